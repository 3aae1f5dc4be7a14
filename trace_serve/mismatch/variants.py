"""The training-time versions that are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trace_serve.hints.rows import HintFile
from trace_serve.recipe import Recipe

Rounds = Literal["bf16", "nearest", "guided", "replay"]


@dataclass(frozen=True)
class Variant:
    """One way to compute the training-time version.

    Attributes:
        key, label: for machines and people.
        rounds: `bf16` quantizes nothing, `nearest` as the recipe does, `guided` toward the rollout's hints, `replay`
            takes its codes and scales.
        weights_only: experts' weights alone are quantized (QaRL: the rollout's weights, BF16 activations and KV).
        deeper_half: only layers L // 2 and on are guided.
        skip_first, skip_last: layers at either end that are not guided.
        sites: that are guided; None is every one that there is.
        scale: how much of the rollout's block scales is known, as in a hint file.
        lost: share of the rows whose hints are missing, drawn at random for each site.
        routing: whether the rollout's routes are replayed (R3).
        quads: whether it is compared with rollouts of QUADS (`quads`) and not with those of the engine.
    """

    key: str
    label: str
    rounds: Rounds
    weights_only: bool = False
    deeper_half: bool = False
    skip_first: int = 0
    skip_last: int = 0
    sites: tuple[str, ...] | None = None
    scale: Literal["byte", "lsb", "none"] = "byte"
    lost: float = 0.0
    routing: bool = True
    quads: bool = False

    def recipe(self, rollout: Recipe) -> Recipe | None:
        """What the model is quantized under; None leaves it in BF16."""
        if self.rounds == "bf16" or (self.weights_only and rollout.experts == "bf16"):
            return None
        return replace(rollout, experts="w4a16", kv="bf16", k_rotation=0) if self.weights_only else rollout

    def layers(self, depth: int) -> range:
        """Layers that are guided in a model of `depth`."""
        return range(depth // 2 if self.deeper_half else self.skip_first, depth - self.skip_last)

    def seen(self, hints: HintFile) -> HintFile:
        """What it knows of a rollout's hints, which have whole codes and scale bytes."""
        if self.scale == "byte" and not self.lost:
            return hints
        generator = np.random.default_rng(0)
        sites = []
        for site in hints.sites:
            scales = site.scales if self.scale == "byte" else None
            if self.scale == "lsb" and site.scales is not None:
                scales = site.scales & np.uint8(1)
            present = site.present & (generator.random(hints.rows) >= self.lost)
            sites.append(replace(site, scales=scales, scale_kind=self.scale, codes=None, present=present))
        return replace(hints, sites=tuple(sites))


_KINDS = (
    Variant("bf16", "BF16 trainer", "bf16"),
    Variant("qat", "vanilla QAT (nearest)", "nearest"),
    Variant("qarl", "QaRL (low-bit weights, BF16 activations)", "nearest", weights_only=True),
    Variant("quads", "QUADS rollouts, BF16 trainer", "bf16", quads=True),
    Variant("quads_qarl", "QUADS rollouts, QaRL trainer", "nearest", weights_only=True, quads=True),
    Variant("trace_deeper_half", "TRACE, deeper half", "guided", deeper_half=True),
    Variant("trace", "TRACE, all layers", "guided"),
    Variant("replay", "full replay of codes", "replay"),
)
VARIANTS = tuple(
    variant if routing else replace(variant, key=f"{variant.key}_no_r3", label=f"{variant.label}, no R3", routing=False)
    for routing in (True, False)
    for variant in _KINDS
)


def probes(depth: int) -> tuple[Variant, ...]:
    """What `--probe` measures beside the variants: which hints a model of `depth` layers can do without."""
    counts = sorted({n for n in (1, 2, depth // 8, depth // 4, depth // 2) if 0 < n < depth})
    first = [
        Variant(f"skip_first_{n}", f"TRACE without the first {_layers(n)}", "guided", skip_first=n) for n in counts
    ]
    last = [Variant(f"skip_last_{n}", f"TRACE without the last {_layers(n)}", "guided", skip_last=n) for n in counts]
    return (
        *first,
        *last,
        Variant("inputs_only", "TRACE, experts' inputs only", "guided", sites=("experts_in",)),
        Variant("kv_only", "TRACE, K and V only", "guided", sites=("k", "v")),
        Variant("no_mid", "TRACE without the second product", "guided", sites=("experts_in", "k", "v")),
        Variant("scale_bits", "TRACE, lowest bits of scales", "guided", scale="lsb"),
        Variant("no_scales", "TRACE without scales", "guided", scale="none"),
        *(
            Variant(f"lost_{share:g}", f"TRACE, {share:.0%} of the rows missing", "guided", lost=share)
            for share in (0.01, 0.03, 0.1, 0.3)
        ),
    )


def _layers(count: int) -> str:
    return "layer" if count == 1 else f"{count} layers"
