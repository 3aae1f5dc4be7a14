"""Attention of a transformers model over a fake-quantized KV cache, as a trainer under a recipe computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_serve.errors import ConfigError
from trace_serve.guided.hf.rounding import Rounding, rotated
from trace_serve.recipe import Recipe

_BASE = "sdpa"
_IMPLEMENTATION = "trace_serve_fake_quantized"


def quantize_kv(model: Any, recipe: Recipe, rounding: Rounding) -> list[KeptLayer]:
    """Makes the recipe's layers attend to K and V as an NVFP4 cache would keep them, the newest token's too.

    K is rotated first where the recipe says so, and the queries with it, so that scores are those of the unrotated
    product. The model may have a cache of its own, which then holds K and V as they were computed.

    Returns:
        Layers that are quantized; each wants to know of every pass (`KeptLayer.begin`).

    Raises:
        ConfigError: the model's attention cannot be exchanged, or the recipe quantizes none of its layers.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")]
    chosen = [module for module in layers if recipe.quantizes_kv(module.layer_idx)]
    if not chosen:
        raise ConfigError(f"{type(model).__name__}: has no KV cache that the recipe quantizes", field="recipe")
    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS[_BASE])
    model.set_attn_implementation(_IMPLEMENTATION)
    if model.config.get_text_config()._attn_implementation != _IMPLEMENTATION:
        raise ConfigError(
            f"{type(model).__name__}: its attention cannot be exchanged; use a recipe with kv bf16", field="recipe"
        )
    for module in chosen:
        module.trace_serve = KeptLayer(module.layer_idx, recipe, rounding)
    return [module.trace_serve for module in chosen]


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """query [B, heads, T, D], key and value [B, KV heads, S, D], of which the last T are this pass's."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layer: KeptLayer | None = getattr(module, "trace_serve", None)
    if layer is not None:
        query, key, value = layer.rounded(query, key, value)
    found: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS[_BASE](module, query, key, value, mask, **options)
    return found


@dataclass
class _Side:
    """K or V of one sequence so far, as computed and as kept, so that a token is rounded once."""

    computed: Tensor | None = None
    kept: Tensor | None = None


class KeptLayer:
    """One layer's K and V as its cache would keep them."""

    def __init__(self, layer: int, recipe: Recipe, rounding: Rounding) -> None:
        self._layer, self._recipe, self._rounding = layer, recipe, rounding
        self._k, self._v = _Side(), _Side()
        self._end = 0

    def begin(self, first: int, count: int) -> None:
        """A pass over these positions starts; at 0 it is another sequence, whatever its first tokens are."""
        self._end = first + count
        if first == 0:
            self._k, self._v = _Side(), _Side()

    def rounded(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `_forward` has them, to what attention under the recipe sees."""
        width, layer, rounding = self._recipe.k_rotation, self._layer, self._rounding
        # A sliding window has forgotten the first positions.
        start = self._end - key.shape[2]
        query = rotated(query, width).to(query.dtype)
        key = _extended(self._k, key, lambda x, known: rounding.keys(layer, rotated(x, width), start + known))
        value = _extended(self._v, value, lambda x, known: rounding.values(layer, x, start + known))
        return query, key, value


def _extended(side: _Side, computed: Tensor, rounds: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Rounds [B, heads, S, D], but not again what the pass before it rounded."""
    known = 0
    if side.computed is not None and side.kept is not None and not computed.requires_grad:
        length = side.computed.shape[2]
        same = side.computed.shape[:2] == computed.shape[:2] and length <= computed.shape[2]
        known = length if same and torch.equal(side.computed, computed[:, :, :length]) else 0
    kept = rounds(computed[:, :, known:], known).to(computed.dtype) if known < computed.shape[2] else computed[:, :, :0]
    if known and side.kept is not None:
        kept = torch.cat([side.kept, kept], dim=2)
    if not computed.requires_grad:
        side.computed, side.kept = computed, kept
    return kept
