"""Counts how many codes of a trainer differ from the rollout's in their lowest bit, site by site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from trace_serve.guided.outcomes import unpack_bits
from trace_serve.guided.replay import HintedRounding
from trace_serve.nvfp4 import hint_bits, quantize, quantize_tokens
from trace_serve.recipe import Recipe


class MeasuredRounding:
    """Rounds as `guided` does, and compares the trainer's own nearest codes with every hint there is.

    Args:
        guided: the rounding that is used.
        every: the same hints for every layer and site, to compare with.
        recipe: of the rollout.
    """

    def __init__(self, guided: HintedRounding, every: HintedRounding, recipe: Recipe) -> None:
        self._guided, self._every, self._recipe = guided, every, recipe
        self._values: Counter[str] = Counter()
        self._differ: Counter[str] = Counter()

    @staticmethod
    def shares(measured: Iterable[MeasuredRounding]) -> dict[str, float]:
        """Share of values with another lowest bit, by site, over several passes."""
        values: Counter[str] = Counter()
        differ: Counter[str] = Counter()
        for each in measured:
            values += each._values
            differ.update(each._differ)
        return {site: differ[site] / count for site, count in sorted(values.items())}

    def begin(self, first: int, count: int) -> None:
        self._guided.begin(first, count)
        self._every.begin(first, count)

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        outcomes = self._every.outcomes("experts_in", layer, x)
        if outcomes is not None:
            kept = quantize_tokens(x.detach(), self._recipe, static_scale=self._recipe.experts_in_scale(layer))
            self._count("experts_in", hint_bits(kept.codes), outcomes.bits, outcomes.present)
        return self._guided.experts_in(layer, x)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        outcomes = self._every.outcomes("experts_mid", layer, x, rows, places)
        if outcomes is not None:
            kept = quantize_tokens(x.detach(), self._recipe, static_scale=self._recipe.experts_mid_scale(layer))
            self._count("experts_mid", hint_bits(kept.codes), outcomes.bits, outcomes.present)
        return self._guided.experts_mid(layer, x, rows, places)

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        self._cached("k", layer, x, first, self._recipe.kv_scales(layer)[0])
        return self._guided.keys(layer, x, first)

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        self._cached("v", layer, x, first, self._recipe.kv_scales(layer)[1])
        return self._guided.values(layer, x, first)

    def _cached(self, site: str, layer: int, x: Tensor, first: int, scale: float) -> None:
        outcomes = self._every.cached_outcomes(site, layer, x, first)
        if outcomes is None:
            return
        batch, heads, count, width = x.shape
        flat = x.detach().transpose(1, 2).reshape(batch * count, heads * width)
        kept = quantize(flat, scale, self._recipe, operand="kv")
        self._count(site, hint_bits(kept.codes), outcomes.bits, outcomes.present)

    def _count(self, site: str, own: Tensor, rollout: Tensor, present: Tensor | None) -> None:
        differs = unpack_bits(own) != unpack_bits(rollout)
        if present is not None:
            differs = differs[present]
        self._values[site] += differs.numel()
        self._differ[site] += int(differs.sum())
