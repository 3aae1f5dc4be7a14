"""The decision: paired results and evidence in, one verdict out. It fails closed: what was not shown never passes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from eval_gate.arms.records import Role
from eval_gate.causes import Cause, find_causes
from eval_gate.compare import compare, method_name
from eval_gate.divergence import token_divergence
from eval_gate.flips import count_flipped, flipped_queries
from eval_gate.looks import schedule
from eval_gate.outcomes import Outcomes
from eval_gate.pairing import ArmResults, ItemSet, Pair, first_samples, pair_up, summarize
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern, Finding, check_arm, compare_arms, compare_prompts
from eval_gate.ruling import Design, overall_outcome, rule_suites
from eval_gate.stats.floor import queries_needed, zero_discordance_floor
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import ArmSummary, LookResult, Subjects, Verdict


@dataclass(frozen=True)
class Judgement:
    """What the results so far say, before it is written down as a verdict.

    Attributes:
        level: one-sided level of this look for all queries together.
        causes: in deciding order; never empty.
    """

    pairs: list[Pair]
    outcomes: Outcomes
    training: ArmSummary
    serving: ArmSummary
    findings: list[Finding]
    path: tuple[LookResult, ...]
    level: float
    causes: list[Cause]

    @property
    def final(self) -> bool:
        """Would further looks be pointless: decided, or nothing that may be compared?"""
        first = self.causes[0]
        return first.outcome is not Outcome.INCONCLUSIVE or first.name in (Concern.UNPROVEN, Concern.CONFOUNDED)


def judge(
    policy: GatePolicy, queries: ItemSet, training: ArmResults, serving: ArmResults, *, looked: int | None = None
) -> Judgement:
    """Judges whatever was gathered; samples that are missing count as errors.

    Causes are looked for in this order, and the first decides: arms that are unproven or confounded, too many samples
    without a grade, a degenerate serving arm, a baseline that is too weak, each suite's rule, truncation asymmetry.

    Args:
        queries: all that the run planned, in the order of its looks.
        looked: looks taken; the queries of later ones are not missing, they were not needed. None is all of them.
    """
    plan = schedule(queries.queries, policy.looks)
    design = Design.of(plan, policy)
    taken = plan[:looked]
    last = len(taken) - 1
    pairs = pair_up([query for part in taken for query in part], [*training.samples, *serving.samples], policy.repeats)
    outcomes = Outcomes.of(pairs)
    one = summarize(record for pair in pairs for record in pair.training)
    two = summarize(record for pair in pairs for record in pair.serving)
    findings = gather_findings(training, serving, pairs)
    path = _path(pairs, outcomes, [len(part) for part in plan], last, design)
    return Judgement(
        pairs=pairs,
        outcomes=outcomes,
        training=one,
        serving=two,
        findings=findings,
        path=path,
        level=design.level(last, policy.alpha),
        causes=find_causes(policy, findings, (one, two), path[-1].suites),
    )


def decide(
    policy: GatePolicy,
    queries: ItemSet,
    training: ArmResults,
    serving: ArmResults,
    *,
    results_digest: str,
    looked: int | None = None,
    now: datetime | None = None,
) -> Verdict:
    """The verdict on whatever was gathered; see `judge` for the rule and its arguments."""
    found = judge(policy, queries, training, serving, looked=looked)
    overall = compare(found.outcomes, policy, level=found.level)
    cause = found.causes[0]
    created = now or datetime.now(UTC)
    report = serving.evidence.report
    flipped = flipped_queries(found.pairs)
    margin = overall.margin if overall.margin is not None and 0 < overall.margin < 1 else policy.margin
    kinds = np.array([pair.query.kind for pair in found.pairs])
    return Verdict(
        outcome=cause.outcome,
        exit_code=cause.exit_code,
        cause=cause.name,
        reasons=tuple(one.message for one in found.causes),
        policy=policy,
        method=method_name(found.outcomes, policy),
        floor=zero_discordance_floor(found.outcomes.take(found.outcomes.scored).units, found.level),
        queries_needed=queries_needed(margin, found.level),
        overall=overall,
        suites=found.path[-1].suites,
        looks=found.path if policy.looks > 1 else (),
        kinds={
            str(kind): compare(found.outcomes.take(kinds == kind), policy, level=found.level)
            for kind in np.unique(kinds)
        },
        training=found.training,
        serving=found.serving,
        findings=tuple(found.findings),
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
        flipped=flipped,
        flipped_left_out=count_flipped(found.pairs) - len(flipped),
        divergence=token_divergence(found.pairs),
        tools=tool_versions(),
    )


def _path(
    pairs: Sequence[Pair], outcomes: Outcomes, sizes: Sequence[int], last: int, design: Design
) -> tuple[LookResult, ...]:
    """What every look up to number `last` showed, each from its own queries and those of the looks before it."""
    names = np.array([pair.query.suite for pair in pairs])
    ends = np.cumsum(sizes)
    path = []
    for look in range(last + 1):
        reached = np.arange(len(pairs)) < ends[look]
        suites = {str(name): outcomes.take(reached & (names == name)) for name in np.unique(names)}
        results = rule_suites(suites, design, look)
        path.append(
            LookResult(
                look=look + 1,
                queries=int(ends[look]),
                planned=int(ends[-1]),
                outcome=overall_outcome(results),
                suites=results,
            )
        )
    return tuple(path)


def gather_findings(training: ArmResults, serving: ArmResults, pairs: Sequence[Pair]) -> list[Finding]:
    """Every preflight finding, confounded first."""
    prompts = compare_prompts(first_samples(pairs, Role.TRAINING), first_samples(pairs, Role.SERVING))
    return [
        *compare_arms(training.evidence, serving.evidence),
        *(serving.findings or prompts),
        *check_arm(Role.TRAINING, training.evidence),
        *check_arm(Role.SERVING, serving.evidence),
    ]


def tool_versions() -> dict[str, str]:
    """Versions of what computed the verdict."""
    found = {"python": platform.python_version()}
    for name in ("trace-serve", "numpy", "scipy", "securesystemslib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
