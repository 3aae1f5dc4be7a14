"""What an attribution found: one object that the terminal, JSON and HTML forms read. It carries no logic."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from eval_gate.attribute.cost import Cost
from eval_gate.attribute.drift import TokenDrift
from eval_gate.attribute.layers import Resolution
from eval_gate.attribute.readings import Standing
from eval_gate.attribute.rounding import RoundingShare
from eval_gate.attribute.trials import Stage
from eval_gate.attribute.variants import Part
from eval_gate.policy import GatePolicy
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import ArmSummary, Comparison, FlippedQuery


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Step(_Part):
    """One recipe against the BF16 answers.

    Attributes:
        described: what is in FP4, in words.
        outcome: as a gate run of this recipe on these queries would decide, and `reason` why.
        refusals: answers that open with a refusal.
        recorded: every answer was there already, so no engine was started.
        seconds: wall-clock time of the step.
    """

    stage: Stage
    label: str
    described: str
    recipe_id: str
    recipe: dict[str, Any]
    outcome: Outcome
    reason: str
    comparison: Comparison
    cost: Cost
    serving: ArmSummary
    refusals: int
    drift: TokenDrift
    recorded: bool
    seconds: float


class PartResult(_Part):
    """One part alone in FP4; `standing` is `not tried` where the budget ended before."""

    part: Part
    standing: Standing
    comparison: Comparison | None


class ActivationResult(_Part):
    """The experts' weights alone in FP4, and what quantizing their inputs adds."""

    weights: Comparison
    standing: Standing
    added: Comparison


class LayerResult(_Part):
    """Layers that lose when they alone are in FP4."""

    part: Part
    layers: tuple[int, ...]
    resolution: Resolution
    comparison: Comparison


class Remedy(_Part):
    """A recipe that passes on these queries.

    Attributes:
        extra_weights_bytes, extra_kv_bytes_per_token: beside the recipe that was given.
    """

    label: str
    described: str
    recipe_id: str
    recipe: dict[str, Any]
    comparison: Comparison
    cost: Cost
    extra_weights_bytes: int
    extra_kv_bytes_per_token: int


class Attribution(_Part):
    """The whole finding.

    Attributes:
        conclusions: what was found, in sentences, the most important first.
        steps: in the order in which they were taken.
        remedy: the cheapest recipe found to pass; None when none did.
        left_out: remedies that were not tried, with the reason.
        stopped: `engines` or `wall` when the budget ended the search, else None.
        flipped: queries that flipped under the recipe that was given.
        rounding: distance of the served answers from their training-time versions; None where it was not asked for.
    """

    schema_version: Literal[1] = 1
    model: str
    model_digest: str
    described: str
    recipe: dict[str, Any]
    recipe_id: str
    policy: GatePolicy
    query_source: str
    query_digest: str
    queries: int
    budget: int
    bf16: ArmSummary
    bf16_refusals: int
    bf16_cost: Cost
    conclusions: tuple[str, ...]
    steps: tuple[Step, ...]
    parts: tuple[PartResult, ...]
    activations: ActivationResult | None
    layers: tuple[LayerResult, ...]
    remedy: Remedy | None
    left_out: tuple[str, ...]
    stopped: str | None
    flipped: tuple[FlippedQuery, ...]
    rounding: RoundingShare | None = None
    created: AwareDatetime
    tools: dict[str, str]
