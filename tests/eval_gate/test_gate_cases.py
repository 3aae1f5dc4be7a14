"""Conditions under which other evaluations gave a wrong answer; the id of each test case names its condition."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval_gate.arms.evidence import ArmEvidence, EngineReport, GenerationDefaults
from eval_gate.arms.records import Role, SampleRecord, read_results
from eval_gate.checkers import GraderPool, PoolLimits
from eval_gate.decide import decide
from eval_gate.noise import measure_noise
from eval_gate.pairing import ArmResults
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet
from eval_gate.report.html import render_html
from eval_gate.report.junit import render_junit
from eval_gate.report.markdown import render_markdown
from eval_gate.report.terminal import print_verdict
from eval_gate.run import ArmConfig, GateConfig, GateResult, run_gate
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import Verdict

Report = Callable[..., dict[str, Any]]


def reply(text: str | None, prompt: str, *, tokens: int = 1, finish: str = "stop") -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens},
    }


def number(prompt: str) -> int:
    return int(prompt.split()[0])


def reports(verdict: Verdict) -> list[str]:
    console = Console(file=io.StringIO(), width=400)
    print_verdict(verdict, console)
    shown = console.file.getvalue()
    return [shown, render_html(verdict), render_markdown(verdict).replace("\\", ""), render_junit(verdict)]


class Gate:
    """Two servers under one served name that answer `N is which number?` with N."""

    def __init__(self, start: Callable[[], Any], report: Report, tmp_path: Path) -> None:
        self.training, self.serving = start(), start()
        self.training.report, self.serving.report = report("bf16"), report("fp4")
        self.training.answer = self.serving.answer = lambda prompt: prompt.split()[0]
        self.tmp_path = tmp_path

    def run(self, queries: int = 80, out: str = "out", **changes: Any) -> GateResult:
        return run_gate(self.config(queries, out, **changes))

    def config(self, queries: int, out: str = "out", **changes: Any) -> GateConfig:
        path = self.tmp_path / "q.jsonl"
        if not path.exists():
            checker = {"type": "numeric"}
            lines = [
                {
                    "id": f"q{i}",
                    "prompt": f"{i} is which number?",
                    "max_tokens": 64,
                    "checker": checker | {"expected": i},
                }
                for i in range(queries)
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        arms = (ArmConfig(self.training.url), ArmConfig(self.serving.url))
        return GateConfig(*arms, str(path), self.tmp_path / out, **changes)


@pytest.fixture
def gate(start_server: Callable[[], Any], engine_report: Report, tmp_path: Path) -> Gate:
    return Gate(start_server, engine_report, tmp_path)


@pytest.mark.parametrize(
    "digest", [pytest.param("own", id="same-name-cache"), pytest.param("shared", id="same-name-cache-one-artifact")]
)
def test_answers_of_one_arm_are_never_taken_for_the_other_under_the_same_name(
    gate: Gate, engine_report: Report, digest: str
) -> None:
    if digest == "shared":
        gate.serving.report = engine_report("fp4", policy_digest=gate.training.report["policy_digest"])
    assert gate.training.models == gate.serving.models
    first = gate.run()
    kept = [r for r in read_results(first.paths.results) if not isinstance(r, SampleRecord) or r.role is Role.TRAINING]
    only_training = gate.tmp_path / "training.jsonl"
    only_training.write_text("".join(record.model_dump_json() + "\n" for record in kept))
    gate.serving.answer = lambda prompt: "no"
    gate.training.prompts.clear()
    gate.serving.prompts.clear()
    verdict = gate.run(out="again", reuse=(only_training,)).verdict
    assert (len(gate.training.prompts), len(gate.serving.prompts)) == (0, 80)
    assert (verdict.outcome, verdict.training.passed, verdict.serving.passed) == (Outcome.BLOCK, 80, 0)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("!" * 64, id="bang-to-the-cap"),
        pytest.param("! " * 64, id="bang-to-the-cap-spaced"),
        pytest.param("", id="bang-to-the-cap-invisible"),
        pytest.param(None, id="bang-to-the-cap-null"),
    ],
)
def test_one_token_to_the_limit_blocks_by_its_own_name(gate: Gate, text: str | None) -> None:
    gate.serving.answer = lambda prompt: reply(text, prompt, tokens=64, finish="length")
    verdict = gate.run(5).verdict
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.BLOCK, "degenerate", 1)
    assert "degenerate output: 5 of 5" in verdict.reasons[0]
    for text in reports(verdict):
        assert "degenerate output: 5 of 5" in text


@pytest.mark.parametrize(
    "shown", [pytest.param("ids", id="missing-bos"), pytest.param("counts", id="missing-bos-by-count")]
)
def test_a_prompt_without_its_leading_token_is_confounded_and_no_gap(gate: Gate, shown: str) -> None:
    gate.serving.answer = lambda prompt: "no"
    if shown == "ids":
        gate.training.tokens = lambda messages: [1, *messages[-1]["content"].encode()]
        gate.serving.tokens = lambda messages: list(messages[-1]["content"].encode())
    else:
        gate.serving.extra_prompt_tokens = -1
    verdict = gate.run().verdict
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.INCONCLUSIVE, "confounded", 2)
    expected = "lacks the leading token 1 (BOS?)" if shown == "ids" else "in the serving arm"
    assert expected in verdict.reasons[0]


@pytest.mark.parametrize(
    "fault", [pytest.param(503, id="errors-dropped"), pytest.param(400, id="errors-dropped-not-retried")]
)
def test_errors_leave_no_rate_over_the_rest(gate: Gate, fault: int) -> None:
    gate.serving.answer = lambda prompt: "no" if number(prompt) < 10 else prompt.split()[0]
    for index in range(10, 20):
        gate.serving.faults[f"{index} is which number?"] = [fault] * 4
    verdict = gate.run(100, concurrency=16).verdict
    retried = fault == 503
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INCONCLUSIVE, 4 if retried else 2)
    assert verdict.serving.unscored == {"http_5xx" if retried else "http_4xx": 10}
    assert verdict.serving.attempts == 90 + 10 * (4 if retried else 1)
    assert (verdict.serving.passed, verdict.serving.failed, verdict.serving.pass_rate) == (80, 10, None)
    assert (verdict.serving.pass_rate_low, verdict.serving.pass_rate_high) == (0.8, 0.9)
    for text in reports(verdict):
        assert "10 of 100 samples of the serving arm have no grade" in text
    for text in reports(verdict)[:3]:
        assert "80.0% to 90.0%" in text


@pytest.mark.parametrize(
    "concurrency", [pytest.param(16, id="seed-ignored"), pytest.param(4, id="seed-ignored-at-low-concurrency")]
)
def test_an_arm_against_itself_shows_what_no_seed_prevents(gate: Gate, concurrency: int) -> None:
    answers = itertools.count()
    # Long enough for more than 8 to meet even on a slow machine.
    gate.training.delay_s = 0.5 if concurrency > 8 else 0.01

    def answer(prompt: str) -> str:
        # A batch of more than 8 rounds otherwise, so that every third answer is another.
        return "no" if gate.training.in_flight > 8 and next(answers) % 3 == 0 else prompt.split()[0]

    gate.training.answer = answer
    found = measure_noise(gate.config(80, concurrency=concurrency), Role.SERVING)
    assert all("seed" not in body for body in gate.training.bodies)
    assert (found.queries, found.concurrency) == (80, concurrency)
    assert (found.texts_differ > 0) == (found.grades_differ > 0) == (concurrency > 8)
    assert found.smallest_margin is not None
    assert found.smallest_margin > 0.02


@pytest.mark.parametrize(
    ("training", "serving"),
    [
        pytest.param((2, 32007), (2,), id="past-eos-stop-ids"),
        pytest.param((2,), (2, 32007), id="past-eos-stop-ids-in-training"),
    ],
)
def test_an_arm_that_goes_on_past_an_end_token_is_confounded_by_its_stop_ids(
    engine_report: Report, training: tuple[int, ...], serving: tuple[int, ...]
) -> None:
    arms = []
    for role, mode, stop_ids in ((Role.TRAINING, "bf16", training), (Role.SERVING, "fp4", serving)):
        report = EngineReport.model_validate(engine_report(mode))
        evidence = ArmEvidence(source=role, report=report, generation=GenerationDefaults(stop_ids=stop_ids))
        arms.append(ArmResults(evidence, []))
    query = Query.model_validate({"id": "q", "prompt": "p", "checker": {"type": "exact", "expected": "x"}})
    queries = QuerySet((query,), "sha256:" + "c" * 64, "q.jsonl")
    verdict = decide(GatePolicy(), queries, *arms, results_digest="sha256:" + "d" * 64)
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "confounded")
    assert f"stop token ids: training arm {list(training)}, serving arm {list(serving)}" in verdict.reasons[0]


@pytest.mark.parametrize(
    "longer", [pytest.param("serving", id="past-eos"), pytest.param("training", id="past-eos-in-training")]
)
def test_answers_of_other_lengths_are_reported_though_they_are_right(gate: Gate, longer: str) -> None:
    getattr(gate, longer).answer = lambda prompt: reply(f"{number(prompt)}", prompt, tokens=60)
    verdict = gate.run().verdict
    assert verdict.outcome is Outcome.PASS
    said = [label for label in verdict.labels if label.startswith("answers of other lengths")]
    assert len(said) == 1
    for text in reports(verdict):
        assert said[0] in text
    assert f"60.0 {'tokens from the training arm' if longer == 'training' else 'from the serving arm'}" in said[0]


@pytest.mark.parametrize("hanging", [pytest.param(2, id="grader-timeout")])
def test_a_grader_that_times_out_in_a_burst_makes_no_answer_wrong(gate: Gate, hanging: int) -> None:
    config = gate.config(80, concurrency=64, graders=PoolLimits(workers=2, timeout_s=1.0))
    path = Path(str(config.queries))
    lines = path.read_text().splitlines()
    hang = {"type": "regex", "pattern": "(.+)+#$"}
    lines[:hanging] = [json.dumps({"id": f"h{i}", "prompt": "a" * 40, "checker": hang}) for i in range(hanging)]
    path.write_text("\n".join(lines) + "\n")
    verdict = run_gate(config).verdict
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.INCONCLUSIVE, "errors", 2)
    for arm in (verdict.training, verdict.serving):
        assert (arm.passed, arm.failed, arm.unscored) == (80 - hanging, 0, {"checker": hanging})


@pytest.mark.parametrize("seed", [pytest.param(0, id="easy-first"), pytest.param(7, id="easy-first-other-seed")])
def test_a_limit_of_queries_takes_a_seeded_sample_and_not_the_easy_first_ones(gate: Gate, seed: int) -> None:
    gate.serving.answer = lambda prompt: prompt.split()[0] if number(prompt) < 60 else "no"
    verdict = gate.run(120, policy=GatePolicy(max_queries=60, sample_seed=seed)).verdict
    asked = {number(prompt) for prompt in gate.serving.prompts}
    assert len(asked) == 60
    assert asked == {number(prompt) for prompt in gate.training.prompts}
    assert 15 < sum(index >= 60 for index in asked) < 45
    assert verdict.outcome is Outcome.BLOCK
    gate.serving.prompts.clear()
    gate.run(120, out="again", policy=GatePolicy(max_queries=60, sample_seed=seed))
    assert {number(prompt) for prompt in gate.serving.prompts} == asked


@pytest.mark.parametrize(
    "checker",
    [
        pytest.param({"type": "math", "expected": "70"}, id="boxed-twice"),
        pytest.param({"type": "numeric", "expected": 70}, id="boxed-twice-numeric"),
    ],
)
@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        (r"<think>\boxed{12}</think> \boxed{70}", True),
        (r"<think>\boxed{70}</think> \boxed{12}", False),
        (r"I first had \boxed{12}, which is wrong: \boxed{70}", True),
    ],
)
async def test_reasoning_is_stripped_and_the_last_box_counts(
    checker: dict[str, Any], answer: str, passed: bool
) -> None:
    query = Query.model_validate({"id": "q", "prompt": "p", "checker": checker})
    async with GraderPool() as graders:
        (grade,) = await graders.grade_many([(query.checker, answer)])
    assert getattr(grade, "passed", grade) is passed


@pytest.mark.parametrize("cut", [pytest.param(30, id="truncation"), pytest.param(4, id="truncation-below-the-cap")])
def test_an_arm_that_is_cut_more_often_does_not_pass(gate: Gate, cut: int) -> None:
    gate.serving.answer = lambda prompt: reply(
        f"{number(prompt)}", prompt, tokens=2, finish="length" if number(prompt) < cut else "stop"
    )
    verdict = gate.run(100).verdict
    assert (verdict.training.truncated, verdict.serving.truncated) == (0, cut)
    if cut == 4:
        assert verdict.outcome is Outcome.PASS
        return
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "truncation")
    for text in reports(verdict):
        assert "30 answers of the serving arm were cut at the token limit against 0 of the training arm" in text


@pytest.mark.parametrize(
    "queries", [pytest.param(30, id="no-difference-seen"), pytest.param(267, id="no-difference-seen-one-too-few")]
)
def test_equal_answers_to_too_few_queries_are_no_pass(gate: Gate, queries: int) -> None:
    verdict = gate.run(queries, policy=GatePolicy(margin=0.01), concurrency=32).verdict
    assert verdict.overall.gap == 0.0
    assert verdict.overall.upper is not None
    assert verdict.overall.upper >= 0.01
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INCONCLUSIVE, 2)
    for text in reports(verdict):
        assert f"{queries} queries are too few, at least 268 are needed" in text
