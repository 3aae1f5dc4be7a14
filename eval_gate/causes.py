"""Why an outcome is what it is: every cause, in the order in which they decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval_gate.arms.records import ErrorClass, Role
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern, Finding
from eval_gate.stats.floor import queries_needed
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import ArmSummary, Comparison, SuiteResult
from trace_serve.errors import EXIT_BLOCK, EXIT_INCONCLUSIVE, EXIT_INFRASTRUCTURE, EXIT_PASS

_EXIT = {Outcome.PASS: EXIT_PASS, Outcome.BLOCK: EXIT_BLOCK, Outcome.INCONCLUSIVE: EXIT_INCONCLUSIVE}
_NOT_INFRASTRUCTURE = frozenset({ErrorClass.CHECKER, ErrorClass.REQUEST, ErrorClass.JUDGE, ErrorClass.BUDGET})
_DEGENERATE_MINIMUM = 2


@dataclass(frozen=True)
class Cause:
    """One reason for an outcome. `name` is for machines, `message` for readers."""

    outcome: Outcome
    name: str
    message: str
    exit_code: int


def find_causes(
    policy: GatePolicy,
    findings: Sequence[Finding],
    summaries: tuple[ArmSummary, ArmSummary],
    suites: Sequence[SuiteResult],
) -> list[Cause]:
    """All causes in deciding order; never empty."""
    training, serving = summaries
    causes = _budget_causes(policy, training, serving)
    causes += [
        _inconclusive(finding.concern, f"{finding.concern}: {finding.message}")
        for finding in findings
        if not (finding.concern is Concern.UNPROVEN and policy.allow_unproven)
    ]
    # What ended the run says why an arm was never asked; that it gave no answers then says nothing more.
    asked = {
        role: arm
        for role, arm in zip(Role, summaries, strict=True)
        if not (causes and arm.unscored == {str(ErrorClass.MISSING): arm.samples})
    }
    causes += _error_causes(policy, asked)
    causes += _degenerate_causes(policy, training, serving)
    if Role.TRAINING in asked:
        causes += _baseline_causes(policy, training, suites)
    if len(asked) < len(summaries):
        return causes
    order = {Outcome.BLOCK: 0, Outcome.INCONCLUSIVE: 1, Outcome.PASS: 2}
    ruled = sorted(suites, key=lambda suite: order[suite.outcome])
    truncation = _truncation_causes(policy, training, serving)
    if ruled[0].outcome is Outcome.BLOCK:
        return [*causes, *(_suite_cause(policy, suite) for suite in ruled), *truncation]
    return [*causes, *truncation, *(_suite_cause(policy, suite) for suite in ruled)]


def _baseline_causes(policy: GatePolicy, training: ArmSummary, suites: Sequence[SuiteResult]) -> list[Cause]:
    """Of the whole, or else of each suite: one that nobody can answer would pass without a difference to show."""
    rates = [("the training arm", training.pass_rate_low)]
    if training.pass_rate_low is None or training.pass_rate_low >= policy.baseline_floor:
        rates = [(f"suite {suite.suite}: the training arm", suite.comparison.training_pass_rate) for suite in suites]
    return [
        _inconclusive(
            "baseline",
            f"baseline: {name} passes {_percent(rate)}, expected at least {_percent(policy.baseline_floor)}; "
            "two broken models would agree",
        )
        for name, rate in rates
        if rate is not None and rate < policy.baseline_floor
    ]


def _budget_causes(policy: GatePolicy, training: ArmSummary, serving: ArmSummary) -> list[Cause]:
    """What ended the run comes first: that it did not reach something, evidence included, is no fault of an arm."""
    arms = (training, serving)
    if not any(ErrorClass.BUDGET in arm.unscored for arm in arms):
        return []
    counts = [sum(arm.unscored.get(kind, 0) for kind in (ErrorClass.BUDGET, ErrorClass.MISSING)) for arm in arms]
    if all(count <= policy.error_cap * arm.samples for count, arm in zip(counts, arms, strict=True)):
        return []
    return [
        _inconclusive(
            "budget",
            f"budget: --max-tokens or --max-wall ended the run before {counts[0]} of {training.samples} samples of the "
            f"training arm and {counts[1]} of {serving.samples} of the serving arm; continue with --resume",
        )
    ]


def _error_causes(policy: GatePolicy, arms: Mapping[Role, ArmSummary]) -> list[Cause]:
    causes = []
    for role, arm in arms.items():
        without = sum(arm.unscored.values())
        if without <= policy.error_cap * arm.samples:
            continue
        kinds = ", ".join(f"{count} {kind}" for kind, count in arm.unscored.items())
        infrastructure = any(kind not in _NOT_INFRASTRUCTURE for kind in arm.unscored)
        name = "infrastructure" if infrastructure else "errors"
        causes.append(
            Cause(
                Outcome.INCONCLUSIVE,
                name,
                f"{name}: {without} of {arm.samples} samples of the {role} arm have no grade ({kinds}), "
                f"expected at most {_percent(policy.error_cap)}",
                EXIT_INFRASTRUCTURE if infrastructure else EXIT_INCONCLUSIVE,
            )
        )
    return sorted(causes, key=lambda cause: cause.name != "infrastructure")


def _degenerate_causes(policy: GatePolicy, training: ArmSummary, serving: ArmSummary) -> list[Cause]:
    excess = serving.degenerate - training.degenerate
    if excess < _DEGENERATE_MINIMUM or excess <= policy.degenerate_cap * serving.samples:
        return []
    return [
        Cause(
            Outcome.BLOCK,
            "degenerate",
            f"degenerate output: {serving.degenerate} of {serving.samples} answers of the serving arm repeat one token "
            f"to the limit (training arm: {training.degenerate})",
            EXIT_BLOCK,
        )
    ]


def _truncation_causes(policy: GatePolicy, training: ArmSummary, serving: ArmSummary) -> list[Cause]:
    if serving.truncated - training.truncated <= policy.truncation_cap * serving.samples:
        return []
    return [
        _inconclusive(
            "truncation",
            f"truncation: {serving.truncated} answers of the serving arm were cut at the token limit against "
            f"{training.truncated} of the training arm; raise max_tokens before judging correctness",
        )
    ]


def _suite_cause(policy: GatePolicy, suite: SuiteResult) -> Cause:
    found = suite.comparison
    if found.gap is None or found.lower is None or found.upper is None or found.margin is None:
        return _inconclusive("unscored", f"suite {suite.suite}: no interval; too few scored queries ({found.scored})")
    bounds = f"[{_points(found.lower)}, {_points(found.upper)}]"
    where = f"suite {suite.suite}: gap {_points(found.gap)} points, interval {bounds}"
    margin = margin_text(policy, found)
    if policy.rule == "point":
        over = suite.outcome is Outcome.BLOCK
        message = f"{where}; the measured gap {'exceeds' if over else 'does not exceed'} {margin} (plain rule)"
        return Cause(suite.outcome, "gap", message, _EXIT[suite.outcome])
    if suite.outcome is Outcome.PASS:
        message = f"{where}; the loss is smaller than the margin of {margin}"
    elif suite.outcome is Outcome.BLOCK:
        message = f"{where}; the loss is larger than the margin of {margin}"
    else:
        needed = queries_needed(found.margin, suite.level) if 0 < found.margin < 1 else found.n
        short = f"; {found.scored} queries are too few, at least {needed} are needed" if found.scored < needed else ""
        message = f"{where}; the interval reaches over the margin of {margin}{short}"
    return Cause(suite.outcome, "gap", message, _EXIT[suite.outcome])


def margin_text(policy: GatePolicy, found: Comparison) -> str:
    """The margin as readers see it: in points, and where it is relative also as a share."""
    if policy.margin_kind == "absolute":
        return f"{100 * policy.margin:g} points"
    in_points = "unknown" if found.margin is None else f"{100 * found.margin:.1f} points"
    return f"{100 * policy.margin:g}% of the training pass rate ({in_points})"


def _inconclusive(name: str, message: str) -> Cause:
    return Cause(Outcome.INCONCLUSIVE, str(name), message, EXIT_INCONCLUSIVE)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _points(gap: float) -> str:
    return f"{100 * gap:+.1f}"
