"""What stops a run before or while it asks: other prompts, other stop ids, a budget; and the other kinds of arms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.defaults import read_defaults
from eval_gate.arms.evidence import ArmEvidence, GenerationDefaults
from eval_gate.arms.records import PromptTokens, Role, SampleRecord, read_results
from eval_gate.checkers import PoolLimits
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern, compare_arms, describe_difference
from eval_gate.run import ArmConfig, GateConfig, GateResult, run_gate
from eval_gate.stats.rule import Outcome
from trace_serve.errors import ConfigError


def tokens(prompt: Any) -> list[int]:
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return [1, *text.encode(), 99]


class Gate:
    def __init__(self, start: Callable[[], Any], report: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
        self.training, self.serving = start(), start()
        self.training.report, self.serving.report = report("bf16"), report("fp4")
        self.training.tokens = self.serving.tokens = tokens
        self.training.answer = self.serving.answer = lambda prompt: prompt.split()[0]
        self.tmp_path = tmp_path
        lines = [
            {"id": f"q{i}", "prompt": f"{i} is?", "max_tokens": 9, "checker": {"type": "numeric", "expected": i}}
            for i in range(80)
        ]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, out: str = "out", **changes: Any) -> GateResult:
        values: dict[str, Any] = {
            "training": ArmConfig(self.training.url),
            "serving": ArmConfig(self.serving.url),
            "queries": str(self.tmp_path / "q.jsonl"),
            "out": self.tmp_path / out,
        }
        return run_gate(GateConfig(**(values | changes)))


@pytest.fixture
def gate(start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path) -> Gate:
    return Gate(start_server, engine_report, tmp_path)


def records(result: GateResult, role: Role) -> list[SampleRecord]:
    found = read_results(result.paths.results)
    return [r for r in found if isinstance(r, SampleRecord) and r.role is role]


def test_a_missing_bos_is_confounded_before_the_serving_arm_is_sampled(gate: Gate) -> None:
    gate.serving.tokens = lambda prompt: tokens(prompt)[1:]
    gate.serving.answer = lambda prompt: "no"
    verdict = gate.run().verdict
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "confounded")
    assert "differ in 80 queries" in verdict.reasons[0]
    assert "lacks the leading token 1 (BOS?)" in verdict.reasons[0]
    assert gate.serving.prompts == []


def test_token_ids_are_kept_with_the_samples(gate: Gate) -> None:
    result = gate.run()
    assert result.verdict.outcome is Outcome.PASS
    (record,) = [r for r in records(result, Role.SERVING) if r.query_id == "q7"]
    assert record.prompt == PromptTokens.of(tokens("7 is?"))


def test_arms_that_cannot_tokenize_are_compared_by_counts(gate: Gate) -> None:
    gate.serving.tokens = None
    assert gate.run().verdict.outcome is Outcome.PASS
    gate.serving.extra_prompt_tokens = 1
    assert gate.run("out2").verdict.cause == "confounded"


@pytest.mark.parametrize(
    ("training", "serving", "message"),
    [
        ([1, 5, 6], [5, 6], "lacks the leading token 1"),
        ([5, 6], [1, 5, 6], "has a leading token 1"),
        ([1, 5, 6], [1, 5, 7], "token 2 is 6 in the training arm and 7"),
        ([*range(40), 7], [*range(40), 8, 9], "41 tokens in the training arm, 42 in the serving arm; they end in"),
        ([*range(40), 3, *range(40)], [*range(40), 4, *range(40)], "they differ in the middle"),
    ],
)
def test_differences_are_described(training: list[int], serving: list[int], message: str) -> None:
    assert message in describe_difference(PromptTokens.of(training), PromptTokens.of(serving))


def test_other_stop_ids_or_sampling_defaults_are_confounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [2, 3]}}')
    assert read_defaults(tmp_path) == GenerationDefaults(stop_ids=(2, 3))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "top_k": 20, "do_sample": true}')
    defaults = read_defaults(tmp_path)
    assert defaults == GenerationDefaults(stop_ids=(2,), sampling={"top_k": 20.0})
    one = ArmEvidence(source="a", generation=defaults)
    two = ArmEvidence(source="b", generation=GenerationDefaults(stop_ids=(2, 3), sampling={"top_k": 50.0}))
    findings = compare_arms(one, two)
    assert {finding.concern for finding in findings} == {Concern.CONFOUNDED}
    assert ["stop token ids" in findings[0].message, "top_k" in findings[1].message] == [True, True]
    assert compare_arms(one, one) == []
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_defaults(tmp_path)


def test_a_budget_ends_a_run_without_a_judgement_and_resuming_completes_it(gate: Gate) -> None:
    verdict = gate.run(max_tokens=300, concurrency=1).verdict
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.INCONCLUSIVE, "budget", 2)
    assert "budget" in verdict.training.unscored
    asked = len(gate.training.prompts)
    assert 0 < asked < 80
    verdict = gate.run(resume=True).verdict
    assert verdict.outcome is Outcome.PASS
    assert len(gate.training.prompts) == 80
    assert gate.run("wall", max_wall_s=0.0).verdict.cause == "budget"


def test_the_completions_route_has_no_chat_template(gate: Gate, tmp_path: Path) -> None:
    assert gate.run(policy=GatePolicy(api="completions")).verdict.outcome is Outcome.PASS
    assert gate.serving.bodies[0]["prompt"].endswith("is?")
    assert "messages" not in gate.serving.bodies[0]
    conversation = {
        "id": "c",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "checker": {"type": "exact", "expected": "x"},
    }
    (tmp_path / "c.jsonl").write_text(json.dumps(conversation) + "\n")
    with pytest.raises(ConfigError, match="'c': is a conversation"):
        gate.run("out2", queries=str(tmp_path / "c.jsonl"), policy=GatePolicy(api="completions"))
    assert not (tmp_path / "out2").exists()


def test_recorded_results_are_an_arm(gate: Gate) -> None:
    first = gate.run()
    gate.training.prompts.clear()
    recorded = ArmConfig(f"results:{first.paths.results}")
    gate.serving.answer = lambda prompt: "no"
    verdict = gate.run("again", training=recorded).verdict
    assert (verdict.outcome, verdict.training.passed, verdict.serving.passed) == (Outcome.BLOCK, 80, 0)
    assert gate.training.prompts == []
    assert verdict.training_evidence.report is not None
    with pytest.raises(ConfigError, match="cannot be read"):
        gate.run("none", training=ArmConfig("results:no.jsonl"))


def test_recorded_results_that_lack_answers_are_not_filled_in(gate: Gate, tmp_path: Path) -> None:
    first = gate.run()
    lines = first.paths.results.read_text().splitlines(keepends=True)
    dropped = [line for line in lines if '"query_id":"q3"' not in line]
    (tmp_path / "part.jsonl").write_text("".join(dropped))
    verdict = gate.run("again", serving=ArmConfig(f"results:{tmp_path / 'part.jsonl'}")).verdict
    assert verdict.serving.unscored == {"missing": 1}


def test_queries_are_redacted_once_for_both_arms(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gate_test_redactor.py").write_text(
        "__version__ = '2.1'\nseen = []\n"
        "def apply(text):\n    seen.append(text)\n    return text.replace('is', '***')\n"
        "def broken(text):\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = gate.run(redact="gate_test_redactor:apply")
    verdict = result.verdict
    assert verdict.policy.redaction == "gate_test_redactor:apply 2.1"
    assert sorted(gate.training.prompts) == sorted(gate.serving.prompts)
    assert all("***" in prompt for prompt in gate.serving.prompts)
    import gate_test_redactor

    assert len(gate_test_redactor.seen) == 80
    plain = gate.run("plain").verdict
    assert verdict.subjects.queries != plain.subjects.queries
    assert "is?" not in (tmp_path / "out" / "queries.jsonl").read_text()
    with pytest.raises(ConfigError, match="returned NoneType, expected a text"):
        gate.run("broken", redact="gate_test_redactor:broken")
    with pytest.raises(ConfigError, match="cannot be imported"):
        gate.run("none", redact="no_such_module:f")


def test_a_key_that_a_server_repeats_is_not_stored(gate: Gate, tmp_path: Path) -> None:
    gate.serving.answer = lambda prompt: f"{prompt.split()[0]} key-of-the-arm"
    gate.run(serving=ArmConfig(gate.serving.url, api_key="key-of-the-arm"))
    for path in (tmp_path / "out").iterdir():
        assert b"key-of-the-arm" not in path.read_bytes()


def test_a_grader_that_hangs_is_an_error_class_and_no_wrong_answer(gate: Gate, tmp_path: Path) -> None:
    lines = (tmp_path / "q.jsonl").read_text().splitlines()
    hanging = {"type": "regex", "pattern": "(.+)+#$"}
    lines[:2] = [json.dumps({"id": f"h{i}", "prompt": "a" * 40, "max_tokens": 9, "checker": hanging}) for i in range(2)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines) + "\n")
    limits = PoolLimits(workers=2, timeout_s=1.0)
    verdict = gate.run(graders=limits, policy=GatePolicy(error_cap=0.0)).verdict
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.INCONCLUSIVE, "errors", 2)
    for arm in (verdict.training, verdict.serving):
        assert (arm.passed, arm.failed, arm.unscored) == (78, 0, {"checker": 2})
    assert gate.run("capped", graders=limits, policy=GatePolicy(error_cap=0.05)).verdict.overall.scored == 78


def test_a_query_file_cannot_make_the_machine_do_things(gate: Gate, tmp_path: Path) -> None:
    query = {"id": "x", "prompt": "p", "checker": {"type": "python", "function": "os:system"}}
    (tmp_path / "x.jsonl").write_text(json.dumps(query) + "\n")
    with pytest.raises(ConfigError, match="--allow-checker os:system"):
        gate.run(queries=str(tmp_path / "x.jsonl"))
    assert gate.training.prompts == []
    assert not (tmp_path / "out").exists()
