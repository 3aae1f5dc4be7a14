"""What one recipe's answers say against the BF16 answers to the same queries, under the gate's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from eval_gate.compare import compare
from eval_gate.decide import judge
from eval_gate.outcomes import Outcomes
from eval_gate.pairing import ArmResults, ItemSet, Pair
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import ArmSummary, Comparison
from trace_serve.errors import EXIT_INFRASTRUCTURE, EngineError


class Standing(StrEnum):
    """What a reading says of the part or the layers that were in FP4."""

    CLEAR = "within the margin"
    GUILTY = "loses"
    UNCLEAR = "neither shown"
    UNTESTED = "not tried"


@dataclass(frozen=True)
class Reading:
    """One recipe against BF16.

    Attributes:
        outcome: as a gate run of this recipe would decide, and `reason` why.
        comparison: over all queries, at the policy's level.
        outcomes: pass rates by query, for contrasts with other readings.
        pairs: the answers behind it; none where they were let go.
    """

    outcome: Outcome
    reason: str
    comparison: Comparison
    outcomes: Outcomes
    pairs: tuple[Pair, ...]
    training: ArmSummary
    serving: ArmSummary

    @property
    def standing(self) -> Standing:
        """GUILTY needs a loss beyond chance, or a BLOCK; what merely could lose is UNCLEAR."""
        if self.outcome is Outcome.PASS:
            return Standing.CLEAR
        shown = self.comparison.lower is not None and self.comparison.lower > 0
        return Standing.GUILTY if shown or self.outcome is Outcome.BLOCK else Standing.UNCLEAR

    @property
    def gap(self) -> float:
        return self.comparison.gap or 0.0


def read(policy: GatePolicy, queries: ItemSet, training: ArmResults, serving: ArmResults) -> Reading:
    """Judges one recipe's answers.

    Raises:
        EngineError: too many answers are missing, or the arms are not what they must be, so that the gap would
            mean nothing.
    """
    found = judge(policy, queries, training, serving)
    cause = found.causes[0]
    if cause.exit_code == EXIT_INFRASTRUCTURE or cause.name in (Concern.UNPROVEN, Concern.CONFOUNDED):
        raise EngineError(f"{serving.evidence.source}: {cause.message}")
    return Reading(
        outcome=cause.outcome,
        reason=cause.message,
        comparison=compare(found.outcomes, policy, level=found.level),
        outcomes=found.outcomes,
        pairs=tuple(found.pairs),
        training=found.training,
        serving=found.serving,
    )


def contrast(more: Reading, less: Reading, policy: GatePolicy) -> Comparison:
    """How much more one recipe loses than another, query by query: the gap is pass rate of `less` minus `more`."""
    paired = Outcomes(less.outcomes.serving, more.outcomes.serving, more.outcomes.clusters)
    return compare(paired, policy.model_copy(update={"margin_kind": "absolute"}))
