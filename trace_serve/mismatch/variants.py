"""The training-time versions that are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trace_serve.recipe import Recipe

Rounds = Literal["bf16", "nearest", "guided"]


@dataclass(frozen=True)
class Variant:
    """One way to compute the training-time version.

    Attributes:
        key, label: for machines and people.
        rounds: `bf16` quantizes nothing, `nearest` as the recipe does, `guided` toward the rollout's hints.
        weights_only: experts' weights alone are quantized (QaRL: the rollout's weights, BF16 activations and KV).
        first_layer, last_layer: layers that are guided, as shares of the depth.
        routing: whether the rollout's routes are replayed (R3).
    """

    key: str
    label: str
    rounds: Rounds
    weights_only: bool = False
    first_layer: float = 0.0
    last_layer: float = 1.0
    routing: bool = True

    def recipe(self, rollout: Recipe) -> Recipe | None:
        """What the model is quantized under; None leaves it in BF16."""
        if self.rounds == "bf16":
            return None
        return replace(rollout, experts="w4a16", kv="bf16", k_rotation=0) if self.weights_only else rollout

    def layers(self, depth: int) -> range:
        """Layers that are guided in a model of `depth`."""
        return range(round(self.first_layer * depth), round(self.last_layer * depth))


_KINDS = (
    Variant("bf16", "BF16 trainer", "bf16"),
    Variant("qat", "vanilla QAT (nearest)", "nearest"),
    Variant("qarl", "QaRL (low-bit weights, BF16 activations)", "nearest", weights_only=True),
    Variant("trace_deeper_half", "TRACE, deeper half", "guided", first_layer=0.5),
    Variant("trace", "TRACE, all layers", "guided"),
)
VARIANTS = tuple(
    variant if routing else replace(variant, key=f"{variant.key}_no_r3", label=f"{variant.label}, no R3", routing=False)
    for routing in (True, False)
    for variant in _KINDS
)

PROBES = tuple(
    Variant(
        f"skip_{end}_{share:g}",
        f"TRACE without the {end} {share:.1%} of layers",
        "guided",
        first_layer=share if end == "first" else 0.0,
        last_layer=1.0 if end == "first" else 1.0 - share,
    )
    for end in ("first", "last")
    for share in (0.125, 0.25, 0.5)
)
"""What `--probe` measures beside the variants: which layers can do without hints."""
