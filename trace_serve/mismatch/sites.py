"""Counts how the trainer's own codes and scales differ from the rollout's, layer by layer at each site."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.guided.outcomes import Outcomes, unpack_bits
from trace_serve.guided.replay import HintedRounding
from trace_serve.nvfp4 import Quantized, e2m1, e4m3, hint_bits, quantize, quantize_tokens, unpack
from trace_serve.recipe import Recipe

Counts = NDArray[np.int64]
_VALUES, _BITS, _CODES, _ONE_STEP, _CODED, _BLOCKS, _SCALES, _SCALE_STEP = range(8)


@dataclass(frozen=True)
class Shares:
    """How much differs where the trainer rounds to nearest what the rollout rounded.

    Attributes:
        bits: share of values whose code has another lowest bit.
        codes: share of values with another code (0 and -0 are one); None where the rollout's codes are not known.
        one_step: of those, the share one step of the E2M1 grid away; None where no code is known to differ.
        scales: share of blocks with another scale (block scale times global scale).
        scale_step: of those, the share whose E4M3 bytes are neighbours under one global scale; None where none differs.
    """

    bits: float
    codes: float | None
    one_step: float | None
    scales: float
    scale_step: float | None


@dataclass(frozen=True)
class SiteShares:
    """One site: over all layers, and layer by layer."""

    total: Shares
    layers: dict[int, Shares]


class MeasuredRounding:
    """Rounds as `guided` does, and compares the trainer's own nearest codes with every hint there is.

    Args:
        guided: the rounding that is used.
        every: the same hints for every layer and site, with scale bytes, to compare with.
        recipe: of the rollout.
    """

    def __init__(self, guided: HintedRounding, every: HintedRounding, recipe: Recipe) -> None:
        self._guided, self._every, self._recipe = guided, every, recipe
        self.counts: dict[tuple[str, int], Counts] = {}

    def begin(self, first: int, count: int) -> None:
        self._guided.begin(first, count)
        self._every.begin(first, count)

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        outcomes = self._every.outcomes("experts_in", layer, x)
        self._tokens("experts_in", layer, x, outcomes, self._recipe.experts_in_scale(layer))
        return self._guided.experts_in(layer, x)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        outcomes = self._every.outcomes("experts_mid", layer, x, rows, places)
        self._tokens("experts_mid", layer, x, outcomes, self._recipe.experts_mid_scale(layer))
        return self._guided.experts_mid(layer, x, rows, places)

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        self._cached("k", layer, x, first, self._recipe.kv_scales(layer)[0])
        return self._guided.keys(layer, x, first)

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        self._cached("v", layer, x, first, self._recipe.kv_scales(layer)[1])
        return self._guided.values(layer, x, first)

    def _tokens(self, site: str, layer: int, x: Tensor, outcomes: Outcomes | None, scale: float | None) -> None:
        if outcomes is not None:
            self._count(site, layer, quantize_tokens(x.detach(), self._recipe, static_scale=scale), outcomes)

    def _cached(self, site: str, layer: int, x: Tensor, first: int, scale: float) -> None:
        outcomes = self._every.cached_outcomes(site, layer, x, first)
        if outcomes is not None:
            batch, heads, count, width = x.shape
            flat = x.detach().transpose(1, 2).reshape(batch * count, heads * width)
            self._count(site, layer, quantize(flat, scale, self._recipe, operand="kv"), outcomes)

    def _count(self, site: str, layer: int, own: Quantized, rollout: Outcomes) -> None:
        known = slice(None) if rollout.present is None else rollout.present
        found = self.counts.setdefault((site, layer), np.zeros(8, dtype=np.int64))
        bits = (unpack_bits(hint_bits(own.codes)) != unpack_bits(rollout.bits))[known]
        found[_VALUES] += bits.numel()
        found[_BITS] += int(bits.sum())
        if rollout.codes is not None:
            steps = (_place(unpack(own.codes)) - _place(rollout.codes)).abs()[known]
            found[_CODED] += steps.numel()
            found[_CODES] += int((steps > 0).sum())
            found[_ONE_STEP] += int((steps == 1).sum())
        if rollout.scales is not None and rollout.scale_kind == "byte":
            own_global = own.global_scale.expand(own.scales.shape[:-1]).unsqueeze(-1)
            its_global = own_global if rollout.global_scale is None else rollout.global_scale.unsqueeze(-1)
            differ = e4m3.decode(own.scales) * own_global != e4m3.decode(rollout.scales) * its_global
            next_to = ((own.scales.int() - rollout.scales.int()).abs() == 1) & (own_global == its_global)
            found[_BLOCKS] += differ[known].numel()
            found[_SCALES] += int(differ[known].sum())
            found[_SCALE_STEP] += int(next_to[known].sum())


def _place(codes: Tensor) -> Tensor:
    """uint8 codes to int32 -7 to 7, neighbours on the E2M1 grid one apart."""
    magnitude = (codes & 7).int()
    return magnitude.where(codes & e2m1.SIGN_BIT == 0, -magnitude)


def shares(measured: Iterable[MeasuredRounding]) -> dict[str, SiteShares]:
    """By site, over several passes."""
    counts: dict[str, dict[int, Counts]] = {}
    for each in measured:
        for (site, layer), found in each.counts.items():
            layers = counts.setdefault(site, {})
            layers[layer] = layers[layer] + found if layer in layers else found
    return {
        site: SiteShares(
            _shares(np.sum(list(layers.values()), axis=0)),
            {layer: _shares(found) for layer, found in sorted(layers.items())},
        )
        for site, layers in sorted(counts.items())
    }


def _shares(found: Counts) -> Shares:
    def share(part: int, whole: int) -> float | None:
        return float(found[part] / found[whole]) if found[whole] else None

    return Shares(
        bits=share(_BITS, _VALUES) or 0.0,
        codes=share(_CODES, _CODED),
        one_step=share(_ONE_STEP, _CODES),
        scales=share(_SCALES, _BLOCKS) or 0.0,
        scale_step=share(_SCALE_STEP, _SCALES),
    )
