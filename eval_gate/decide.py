"""The decision: paired results and evidence in, one verdict out. It fails closed: what was not shown never passes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import ErrorClass, Role, SampleRecord
from eval_gate.compare import compare, independent_units, method_name
from eval_gate.flips import flipped_queries
from eval_gate.pairing import Pair, first_samples, pair_up, summarize
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern, Finding, check_arm, compare_arms, compare_prompts
from eval_gate.queries import QuerySet
from eval_gate.stats.floor import queries_needed, zero_discordance_floor
from eval_gate.stats.rule import Outcome, decide_interval, decide_point
from eval_gate.stats.table import Interval
from eval_gate.verdict import ArmSummary, Comparison, Subjects, SuiteResult, Verdict
from trace_serve.errors import EXIT_BLOCK, EXIT_INCONCLUSIVE, EXIT_INFRASTRUCTURE, EXIT_PASS

_EXIT = {Outcome.PASS: EXIT_PASS, Outcome.BLOCK: EXIT_BLOCK, Outcome.INCONCLUSIVE: EXIT_INCONCLUSIVE}
_NOT_INFRASTRUCTURE = frozenset({ErrorClass.CHECKER, ErrorClass.REQUEST})
_DEGENERATE_MINIMUM = 2


@dataclass(frozen=True)
class Cause:
    """One reason for an outcome. `name` is for machines, `message` for readers."""

    outcome: Outcome
    name: str
    message: str
    exit_code: int


@dataclass(frozen=True)
class ArmResults:
    """Everything that was gathered from one arm."""

    evidence: ArmEvidence
    samples: Sequence[SampleRecord]


def decide(
    policy: GatePolicy,
    queries: QuerySet,
    training: ArmResults,
    serving: ArmResults,
    *,
    results_digest: str,
    now: datetime | None = None,
) -> Verdict:
    """Builds the verdict from whatever was gathered; samples that are missing count as errors.

    Causes are looked for in this order, and the first decides: arms that are unproven or confounded, too many samples
    without a grade, a degenerate serving arm, a baseline that is too weak, each suite's rule, truncation asymmetry.
    """
    pairs = pair_up(queries.queries, [*training.samples, *serving.samples], policy.repeats)
    summaries = (
        summarize(record for pair in pairs for record in pair.training),
        summarize(record for pair in pairs for record in pair.serving),
    )
    findings = gather_findings(training, serving, pairs)
    suites = _by_suite(pairs, policy)
    overall = compare(pairs, policy)
    causes = find_causes(policy, findings, summaries, suites)
    created = now or datetime.now(UTC)
    report = serving.evidence.report
    return Verdict(
        outcome=causes[0].outcome,
        exit_code=causes[0].exit_code,
        cause=causes[0].name,
        reasons=tuple(cause.message for cause in causes),
        policy=policy,
        method=method_name(pairs, policy),
        floor=zero_discordance_floor(independent_units([pair for pair in pairs if pair.scored]), policy.alpha),
        queries_needed=queries_needed(policy.margin, policy.alpha),
        overall=overall,
        suites=suites,
        kinds={kind: compare([p for p in pairs if p.query.kind == kind], policy) for kind in _kinds(pairs)},
        training=summaries[0],
        serving=summaries[1],
        findings=tuple(findings),
        training_evidence=training.evidence,
        serving_evidence=serving.evidence,
        subjects=Subjects(
            serving=serving.evidence.artifact_digest,
            training=training.evidence.artifact_digest,
            queries=queries.digest,
            gate_policy=policy.digest,
            results=results_digest,
        ),
        query_source=queries.source,
        recipe_id=serving.evidence.recipe_id or (report.recipe_id if report else None),
        policy_name=serving.evidence.policy_name,
        policy_version=serving.evidence.policy_version,
        created=created,
        expires=created + timedelta(days=policy.valid_days),
        flipped=flipped_queries(pairs),
        tools=tool_versions(),
    )


def gather_findings(training: ArmResults, serving: ArmResults, pairs: Sequence[Pair]) -> list[Finding]:
    """Every preflight finding, confounded first."""
    prompts = compare_prompts(first_samples(pairs, Role.TRAINING), first_samples(pairs, Role.SERVING))
    return [
        *compare_arms(training.evidence, serving.evidence),
        *prompts,
        *check_arm(Role.TRAINING, training.evidence),
        *check_arm(Role.SERVING, serving.evidence),
    ]


def find_causes(
    policy: GatePolicy,
    findings: Sequence[Finding],
    summaries: tuple[ArmSummary, ArmSummary],
    suites: Sequence[SuiteResult],
) -> list[Cause]:
    """All causes in deciding order; never empty."""
    training, serving = summaries
    causes = [
        _inconclusive(finding.concern, f"{finding.concern}: {finding.message}")
        for finding in findings
        if not (finding.concern is Concern.UNPROVEN and policy.allow_unproven)
    ]
    causes += _error_causes(policy, training, serving)
    causes += _degenerate_causes(policy, training, serving)
    if training.pass_rate_low is not None and training.pass_rate_low < policy.baseline_floor:
        causes.append(
            _inconclusive(
                "baseline",
                f"baseline: the training arm passes {_percent(training.pass_rate_low)}, expected at least "
                f"{_percent(policy.baseline_floor)}; two broken models would agree",
            )
        )
    order = {Outcome.BLOCK: 0, Outcome.INCONCLUSIVE: 1, Outcome.PASS: 2}
    ruled = sorted(suites, key=lambda suite: order[suite.outcome])
    truncation = _truncation_causes(policy, training, serving)
    if ruled[0].outcome is Outcome.BLOCK:
        return [*causes, *(_suite_cause(policy, suite) for suite in ruled), *truncation]
    return [*causes, *truncation, *(_suite_cause(policy, suite) for suite in ruled)]


def _error_causes(policy: GatePolicy, training: ArmSummary, serving: ArmSummary) -> list[Cause]:
    causes = []
    for role, arm in ((Role.TRAINING, training), (Role.SERVING, serving)):
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
    if found.gap is None or found.lower is None or found.upper is None:
        return _inconclusive("unscored", f"suite {suite.suite}: no interval; too few scored queries ({found.scored})")
    bounds = f"[{_points(found.lower)}, {_points(found.upper)}]"
    where = f"suite {suite.suite}: gap {_points(found.gap)} points, interval {bounds}"
    margin = f"{100 * policy.margin:g} points"
    if policy.rule == "point":
        over = suite.outcome is Outcome.BLOCK
        message = f"{where}; the measured gap {'exceeds' if over else 'does not exceed'} {margin} (plain rule)"
        return Cause(suite.outcome, "gap", message, _EXIT[suite.outcome])
    if suite.outcome is Outcome.PASS:
        message = f"{where}; the loss is smaller than the margin of {margin}"
    elif suite.outcome is Outcome.BLOCK:
        message = f"{where}; the loss is larger than the margin of {margin}"
    else:
        needed = queries_needed(policy.margin, policy.alpha)
        short = f"; {found.scored} queries are too few, at least {needed} are needed" if found.scored < needed else ""
        message = f"{where}; the interval reaches over the margin of {margin}{short}"
    return Cause(suite.outcome, "gap", message, _EXIT[suite.outcome])


def _by_suite(pairs: Sequence[Pair], policy: GatePolicy) -> tuple[SuiteResult, ...]:
    results = []
    for name in sorted({pair.query.suite for pair in pairs}):
        found = compare([pair for pair in pairs if pair.query.suite == name], policy)
        results.append(SuiteResult(suite=name, outcome=_rule(policy, found), comparison=found))
    return tuple(results)


def _rule(policy: GatePolicy, found: Comparison) -> Outcome:
    if found.gap is None or found.lower is None or found.upper is None:
        return Outcome.INCONCLUSIVE
    if policy.rule == "point":
        return decide_point(found.gap, policy.margin)
    return decide_interval(Interval(found.lower, found.upper), policy.margin)


def _kinds(pairs: Sequence[Pair]) -> list[str]:
    return sorted({pair.query.kind for pair in pairs})


def _inconclusive(name: str, message: str) -> Cause:
    return Cause(Outcome.INCONCLUSIVE, str(name), message, EXIT_INCONCLUSIVE)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _points(gap: float) -> str:
    return f"{100 * gap:+.1f}"


def tool_versions() -> dict[str, str]:
    """Versions of what computed the verdict."""
    found = {"python": platform.python_version()}
    for name in ("trace-serve", "numpy", "scipy", "securesystemslib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
