"""A judge completes grades: blind to the arm, in seeded order, one judgement for equal answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.records import ErrorClass, Role, SampleRecord, read_results
from eval_gate.checkers import CheckerError
from eval_gate.checkers.judge import read_verdict
from eval_gate.policy import GatePolicy
from eval_gate.run import ArmConfig, GateConfig, GateResult, run_gate
from eval_gate.stats.rule import Outcome

JUDGED = {
    "type": "judged",
    "checker": {"type": "contains", "expected": "refund"},
    "judge": {"type": "judge", "rubric": "The answer is polite.", "reference": "Your refund is on its way."},
}


@pytest.fixture
def gate(start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path) -> Any:
    """Two arms and a judge that likes every answer with `please`."""

    class Gate:
        def __init__(self) -> None:
            self.training, self.serving, self.judge = start_server(), start_server(), start_server()
            self.training.report, self.serving.report = engine_report("bf16"), engine_report("fp4")
            self.training.answer = self.serving.answer = lambda prompt: f"refund {prompt.split()[0]}, please"
            self.judge.answer = lambda asked: f"VERDICT: {'PASS' if 'please' in asked else 'FAIL'}"
            lines = [{"id": f"q{i}", "prompt": f"{i} refund?", "checker": JUDGED} for i in range(60)]
            (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

        def run(self, out: str = "out", **changes: Any) -> GateResult:
            values: dict[str, Any] = {
                "training": ArmConfig(self.training.url),
                "serving": ArmConfig(self.serving.url),
                "judge": ArmConfig(self.judge.url),
                "policy": GatePolicy(judge="the-judge"),
                "queries": str(tmp_path / "q.jsonl"),
                "out": tmp_path / out,
            }
            return run_gate(GateConfig(**(values | changes)))

    return Gate()


def records(result: GateResult) -> list[SampleRecord]:
    return [r for r in read_results(result.paths.results) if isinstance(r, SampleRecord)]


def test_equal_answers_of_both_arms_are_judged_once(gate: Any) -> None:
    result = gate.run()
    assert result.verdict.outcome is Outcome.PASS
    assert result.verdict.policy.judge == "the-judge"
    assert len(gate.judge.bodies) == 60
    assert {body["model"] for body in gate.judge.bodies} == {"the-judge"}
    assert all(r.judgement is not None and r.judgement.passed for r in records(result))


def test_the_judge_never_learns_the_arm_and_asks_in_mixed_order(gate: Any) -> None:
    gate.serving.answer = lambda prompt: f"refund {prompt.split()[0]} now"
    result = gate.run()
    assert (result.verdict.outcome, result.verdict.serving.passed) == (Outcome.BLOCK, 0)
    assert len(gate.judge.bodies) == 120
    for body in gate.judge.bodies:
        assert not {"training", "serving", "same-name", "bf16", "fp4"} & set(json.dumps(body).replace('"', " ").split())
    arms = ["please" in body["messages"][-1]["content"] for body in gate.judge.bodies]
    assert 15 < sum(arms[:60]) < 45


def test_an_answer_that_fails_its_program_is_wrong_without_a_judge(gate: Any) -> None:
    gate.training.answer = gate.serving.answer = lambda prompt: "please"
    result = gate.run()
    assert gate.judge.bodies == []
    assert result.verdict.training.failed == 60


def test_a_judge_without_a_verdict_leaves_samples_ungraded(gate: Any) -> None:
    gate.judge.answer = (
        lambda asked: "PASS, I think" if " 7 refund?" in f" {asked}" or "refund 7," in asked else "VERDICT: PASS"
    )
    result = gate.run(policy=GatePolicy(judge="the-judge", error_cap=0.0))
    assert (result.verdict.cause, result.verdict.exit_code) == ("errors", 2)
    ungraded = [r for r in records(result) if r.passed is None]
    assert {(r.query_id, r.failure.kind) for r in ungraded if r.failure} == {("q7", ErrorClass.JUDGE)}
    assert {r.role for r in ungraded} == set(Role)


def test_judgements_are_kept_for_a_resumed_run(gate: Any) -> None:
    gate.run()
    asked = len(gate.judge.bodies)
    assert gate.run(resume=True).verdict.outcome is Outcome.PASS
    assert len(gate.judge.bodies) == asked


@pytest.mark.parametrize(
    ("reply", "passed"),
    [
        ("It is fine.\nVERDICT: PASS", True),
        ("**Verdict: FAIL**", False),
        ("<think>VERDICT: FAIL</think>\nVERDICT: PASS", True),
        ("VERDICT: PASS\nVERDICT: PASS", True),
        ("VERDICT: PASS\nVERDICT: FAIL", None),
        ("PASS", None),
        ("", None),
    ],
)
def test_a_reply_needs_one_verdict_line(reply: str, passed: bool | None) -> None:
    if passed is None:
        with pytest.raises(CheckerError):
            read_verdict(reply)
    else:
        assert read_verdict(reply) is passed
