"""What a verdict says for results with known faults; each case once fooled a real evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eval_gate.arms.evidence import ArmEvidence, EngineReport
from eval_gate.arms.records import ErrorClass, Failure, Role, SampleRecord
from eval_gate.decide import decide
from eval_gate.pairing import ArmResults
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError
from trace_serve.recipe import Recipe

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class Case:
    """Results of both arms, built by counts and then damaged by the test."""

    def __init__(self, build: Callable[..., dict[str, Any]]) -> None:
        self.build = build
        self.policy = GatePolicy()
        self.reports: dict[Role, dict[str, Any] | None] = {
            Role.TRAINING: build("bf16"),
            Role.SERVING: build("fp4"),
        }
        self.queries: list[Query] = []
        self.samples: dict[Role, list[SampleRecord]] = {Role.TRAINING: [], Role.SERVING: []}

    def add(
        self,
        count: int,
        training: bool | None,
        serving: bool | None,
        *,
        suite: str = "default",
        in_serving: dict[str, Any] | None = None,
    ) -> Case:
        for _ in range(count):
            number = len(self.queries)
            self.queries.append(
                Query.model_validate(
                    {
                        "id": f"q{number}",
                        "kind": "even" if number % 2 == 0 else "odd",
                        "suite": suite,
                        "prompt": f"question {number}",
                        "checker": {"type": "exact", "expected": "yes"},
                    }
                )
            )
            self.samples[Role.TRAINING].append(sample(f"q{number}", Role.TRAINING, training))
            self.samples[Role.SERVING].append(sample(f"q{number}", Role.SERVING, serving, **(in_serving or {})))
        return self

    def verdict(self) -> Verdict:
        arms = {}
        for role, digest in ((Role.TRAINING, A), (Role.SERVING, B)):
            raw = self.reports[role]
            evidence = ArmEvidence(
                source=f"/models/{role}",
                artifact_digest=digest,
                base_digest=A,
                recipe_id=Recipe().recipe_id if role is Role.SERVING else None,
                policy_name="demo" if role is Role.SERVING else None,
                policy_version="1" if role is Role.SERVING else None,
                report=EngineReport.model_validate(raw) if raw is not None else None,
            )
            arms[role] = ArmResults(evidence, self.samples[role])
        queries = QuerySet(tuple(self.queries), "sha256:" + "c" * 64, "q.jsonl")
        return decide(
            self.policy, queries, arms[Role.TRAINING], arms[Role.SERVING], results_digest="sha256:" + "d" * 64
        )


def sample(query_id: str, role: Role, passed: bool | None, **changes: Any) -> SampleRecord:
    values: dict[str, Any] = {
        "key": f"{role}/{query_id}",
        "query_id": query_id,
        "role": role,
        "sample": 0,
        "request": {},
        "text": None if passed is None else ("yes" if passed else "no"),
        "finish_reason": None if passed is None else "stop",
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "attempts": 1,
        "passed": passed,
        "failure": Failure(kind=ErrorClass.TIMEOUT, message="slow") if passed is None else None,
    }
    return SampleRecord.model_validate(values | changes)


@pytest.fixture
def case(engine_report: Callable[..., dict[str, Any]]) -> Case:
    return Case(engine_report)


def test_a_clear_match_passes(case: Case) -> None:
    verdict = case.add(150, True, True).add(80, False, False).add(3, True, False).add(3, False, True).verdict()
    assert (verdict.outcome, verdict.exit_code, verdict.cause) == (Outcome.PASS, 0, "gap")
    assert verdict.overall.gap == 0.0
    assert verdict.overall.upper is not None
    assert verdict.overall.upper < 0.05


def test_a_clear_loss_blocks_and_shows_the_flipped_queries(case: Case) -> None:
    verdict = case.add(100, True, True).add(60, False, False).add(40, True, False).add(2, False, True).verdict()
    assert (verdict.outcome, verdict.exit_code) == (Outcome.BLOCK, 1)
    assert [flip.direction for flip in verdict.flipped] == ["lost"] * 40 + ["gained"] * 2
    assert verdict.flipped[0].first_difference == 0


def test_something_in_between_is_inconclusive(case: Case) -> None:
    verdict = case.add(150, True, True).add(80, False, False).add(12, True, False).verdict()
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INCONCLUSIVE, 2)


def test_no_difference_seen_in_few_queries_does_not_pass(case: Case) -> None:
    case.policy = GatePolicy(margin=0.01)
    verdict = case.add(30, True, True).verdict()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "30 queries are too few, at least 268 are needed" in verdict.reasons[0]


@pytest.mark.parametrize(("n", "outcome"), [(51, Outcome.INCONCLUSIVE), (52, Outcome.PASS)])
def test_the_zero_discordance_floor_is_strict(case: Case, n: int, outcome: Outcome) -> None:
    assert case.add(n, True, True).verdict().outcome is outcome


def test_errors_are_a_class_of_their_own_and_never_dropped(case: Case) -> None:
    case.policy = GatePolicy(error_cap=0.02)
    verdict = case.add(80, True, True).add(10, False, False).add(10, True, None).verdict()
    assert (verdict.outcome, verdict.exit_code, verdict.cause) == (Outcome.INCONCLUSIVE, 4, "infrastructure")
    assert verdict.serving.unscored == {"timeout": 10}
    assert verdict.serving.pass_rate is None
    assert (verdict.serving.pass_rate_low, verdict.serving.pass_rate_high) == (0.8, 0.9)


def test_missing_samples_count_as_errors(case: Case) -> None:
    case.add(100, True, True)
    del case.samples[Role.SERVING][90:]
    verdict = case.verdict()
    assert (verdict.exit_code, verdict.serving.unscored) == (4, {"missing": 10})


def test_checker_faults_are_not_infrastructure(case: Case) -> None:
    fault = {"failure": Failure(kind=ErrorClass.CHECKER, message="broke")}
    verdict = case.add(90, True, True).add(10, True, None, in_serving=fault).verdict()
    assert (verdict.outcome, verdict.exit_code, verdict.cause) == (Outcome.INCONCLUSIVE, 2, "errors")


def test_under_the_cap_an_unscored_query_still_counts_against_a_pass(case: Case) -> None:
    case.policy = GatePolicy(margin=0.03, error_cap=0.05)
    complete = case.add(100, True, True).verdict()
    assert complete.outcome is Outcome.PASS
    verdict = case.add(3, True, None).verdict()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.overall.gap == 0.0
    assert verdict.overall.scored == 100


def test_one_token_to_the_cap_blocks_by_name(case: Case) -> None:
    bang = {"text": "!" * 256, "finish_reason": "length", "completion_tokens": 256}
    verdict = case.add(5, True, False, in_serving=bang).verdict()
    assert (verdict.outcome, verdict.cause) == (Outcome.BLOCK, "degenerate")
    assert "degenerate output: 5 of 5" in verdict.reasons[0]


def test_a_different_rendered_prompt_is_confounded_not_a_gap(case: Case) -> None:
    lost_bos = {"prompt_tokens": 9}
    verdict = case.add(100, True, False, in_serving=lost_bos).verdict()
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.INCONCLUSIVE, "confounded", 2)
    assert "rendered prompts differ in 100 queries" in verdict.reasons[0]
    assert "q0: 10 prompt tokens in the training arm, 9 in the serving arm" in verdict.reasons[0]


@pytest.mark.parametrize("name", ["tokenizer_digest", "chat_template_digest", "context_length", "vocab_size"])
def test_arms_that_see_different_input_are_confounded(case: Case, name: str) -> None:
    other = 1024 if name in ("context_length", "vocab_size") else "sha256:" + "f" * 64
    case.reports[Role.SERVING] = case.build("fp4", **{name: other})
    verdict = case.add(100, True, True).verdict()
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "confounded")
    assert name in verdict.reasons[0]


@pytest.mark.parametrize(
    "report",
    [
        None,
        {"mode": "bf16"},
        {"recipe_id": Recipe(k_rotation=64).recipe_id},
        {"recipe": Recipe(k_rotation=64).to_dict(), "recipe_id": Recipe(k_rotation=64).recipe_id},
        {"experts": {"format": "nvfp4", "layers_quantized": 29, "layers_total": 30}},
        {"kv": {"format": "bf16", "layers_quantized": 30, "layers_total": 30}},
        {"policy_digest": "sha256:" + "9" * 64},
        {"recipe": None},
        {"recipe": {"experts": "int3"}},
    ],
)
def test_a_serving_arm_that_does_not_prove_fp4_never_passes(case: Case, report: dict[str, Any] | None) -> None:
    case.reports[Role.SERVING] = None if report is None else case.build("fp4") | report
    verdict = case.add(100, True, True).verdict()
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "unproven")


def test_a_quantized_training_arm_is_no_baseline(case: Case) -> None:
    case.reports[Role.TRAINING] = case.build("fp4", policy_digest=A)
    assert case.add(100, True, True).verdict().cause == "unproven"


def test_unproven_arms_may_be_allowed_and_are_labelled(case: Case) -> None:
    case.reports = {Role.TRAINING: None, Role.SERVING: None}
    case.policy = GatePolicy(allow_unproven=True)
    verdict = case.add(100, True, True).verdict()
    assert verdict.outcome is Outcome.PASS
    assert any("unproven arms allowed" in label for label in verdict.labels)


def test_two_equally_broken_models_do_not_pass(case: Case) -> None:
    verdict = case.add(300, False, False).add(10, True, True).verdict()
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "baseline")


def test_a_suite_that_nobody_can_answer_does_not_pass_beside_an_easy_one(case: Case) -> None:
    verdict = case.add(300, True, True, suite="easy").add(100, False, False, suite="hard").verdict()
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "baseline")
    assert "suite hard: the training arm passes 0.0%" in verdict.reasons[0]


def test_more_truncation_in_serving_keeps_a_pass_back(case: Case) -> None:
    cut = {"finish_reason": "length"}
    verdict = case.add(160, True, True).add(40, True, True, in_serving=cut).verdict()
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "truncation")
    assert (verdict.training.truncated, verdict.serving.truncated) == (0, 40)


def test_every_suite_must_pass(case: Case) -> None:
    case.add(400, True, True, suite="easy").add(60, True, False, suite="hard").add(40, True, True, suite="hard")
    verdict = case.verdict()
    assert verdict.outcome is Outcome.BLOCK
    assert {suite.suite: suite.outcome for suite in verdict.suites} == {"easy": Outcome.PASS, "hard": Outcome.BLOCK}
    assert verdict.reasons[0].startswith("suite hard")


def test_the_plain_rule_decides_by_the_gap_and_says_so(case: Case) -> None:
    case.policy = GatePolicy(rule="point")
    verdict = case.add(96, True, True).add(4, True, False).verdict()
    assert verdict.outcome is Outcome.PASS
    assert "plain rule" in verdict.reasons[0]
    assert "[" in verdict.reasons[0]
    assert any("plain rule" in label for label in verdict.labels)
    assert case.add(3, True, False).verdict().outcome is Outcome.BLOCK


def test_queries_are_grouped_by_kind(case: Case) -> None:
    verdict = case.add(10, True, True).verdict()
    assert {kind: found.n for kind, found in verdict.kinds.items()} == {"even": 5, "odd": 5}


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"margin": 0.0}, "margin"), ({"alpha": 0.5}, "alpha"), ({"repeats": 0}, "repeats"), ({"margin": "x"}, "margin")],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field}") as caught:
        GatePolicy.build(**changes)
    assert caught.value.field == field


def test_fixed_set_mode_needs_repeats() -> None:
    with pytest.raises(ConfigError, match="raise --repeats"):
        GatePolicy.build(mode="fixed-set")
