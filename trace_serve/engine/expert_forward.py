"""The forward pass of one layer's experts under a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from trace_serve import nvfp4
from trace_serve.engine import state
from trace_serve.engine.ranks import slices_of_rows
from trace_serve.recipe import BLOCK, Recipe


def run(recipe: Recipe, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Quantizes the experts' inputs once a token, keeps their outcome for hints, and sums the experts' outputs.

    Args:
        recipe: numeric choices of the layer.
        layer: SGLang's FusedMoE; `w13_weight` [E, 2I, H] and `w2_weight` [E, H, I] hold NVFP4 images in BF16.
        x: BF16 [T, H].
        topk_weights: [T, K].
        topk_ids: int [T, K]; a negative id is no expert.

    Returns:
        BF16 [T, H].
    """
    engine = state.get()
    engine.telemetry.beat()
    if recipe.experts == "w4a4":
        kept = engine.keeps("experts_in", layer.layer_id)
        inputs, quantized = engine.kernels.fake_quantize_activations(
            x, static_scale=recipe.experts_in_scale(layer.layer_id), hints=kept, counters=engine.shared_counters
        )
        if kept:
            engine.capture("experts_in", layer.layer_id, quantized)
    else:
        inputs = _rotated(recipe, x)
    out = _experts(recipe, layer, inputs, topk_weights, topk_ids)
    engine.flush_counters()
    return out


def _rotated(recipe: Recipe, x: Tensor) -> Tensor:
    width = recipe.expert_rotation
    return nvfp4.rotate(x, width).to(x.dtype) if width else x


def _experts(recipe: Recipe, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """x [T, H] BF16 to [T, H] BF16.

    Products are BF16, SiLU and its product with the up projection are FP32 and rounded once, and experts are summed
    in FP32 in the order of their index. Only the products go expert by expert; all else is done once for all of them.
    """
    engine = state.get()
    # In numpy: these are a few integers, and each torch operation costs as much as a small product.
    flat = topk_ids.flatten().numpy()
    order = np.argsort(flat, kind="stable")
    order = order[np.searchsorted(flat, 0, sorter=order) :]
    experts, counts = (found.tolist() for found in np.unique(flat[order], return_counts=True))
    rows, slots = (torch.from_numpy(found) for found in np.divmod(order, topk_ids.shape[1]))
    out = torch.zeros(x.shape[0], layer.w2_weight.shape[1], dtype=torch.float32)
    if not experts:
        return out.to(x.dtype)
    gate, up = _products(x[rows], layer.w13_weight, experts, counts).float().chunk(2, dim=-1)
    middle = (silu(gate) * up).to(x.dtype)
    if recipe.experts == "w4a4":
        kept = engine.keeps("experts_mid", layer.layer_id)
        static = recipe.experts_mid_scale(layer.layer_id)
        if engine.ranks.size > 1:
            middle, quantized = slices_of_rows(engine.ranks, recipe, middle, static, kept, engine.counters)
        else:
            middle, quantized = engine.kernels.fake_quantize_activations(
                middle, static_scale=static, hints=kept, counters=engine.counters
            )
        if kept:
            codes = engine.expert_slots["experts_mid"].keeps_codes
            outcomes = MiddleOutcomes(topk_ids, layer.w2_weight.shape[2], codes=codes)
            outcomes.add(rows, slots, quantized)
            engine.capture("experts_mid", layer.layer_id, outcomes.quantized)
    else:
        middle = _rotated(recipe, middle)
    weights = topk_weights[rows, slots].float().unsqueeze(-1)
    out.index_add_(0, rows, _products(middle, layer.w2_weight, experts, counts).float() * weights)
    return out.to(x.dtype)


def _products(x: Tensor, weight: Tensor, experts: list[int], counts: list[int]) -> Tensor:
    """Rows of each expert, one expert after the other, times its matrix: [N, K] and [E, M, K] to [N, M]."""
    parts = [linear(rows, weight[expert]) for expert, rows in zip(experts, torch.split(x, counts), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class MiddleOutcomes:
    """Gathers the outcomes of all routed experts of one layer, a token's experts in the order of the router.

    Args:
        topk_ids: int [T, K]; the row of a negative id stays zero.
        intermediate: values of one expert's row, a multiple of 16.
        codes: gather whole codes too.
    """

    def __init__(self, topk_ids: Tensor, intermediate: int, *, codes: bool = False) -> None:
        tokens, experts = topk_ids.shape
        blocks = intermediate // BLOCK
        self._experts = experts
        self._hints = torch.zeros(tokens * experts, blocks, dtype=torch.uint16)
        self._scales = torch.zeros(tokens * experts, blocks, dtype=torch.uint8)
        self._global_scale = torch.ones(tokens * experts)
        self._codes = torch.zeros(tokens * experts, intermediate // 2 if codes else 0, dtype=torch.uint8)

    def add(self, rows: Tensor, slots: Tensor, quantized: nvfp4.Quantized) -> None:
        """Takes rows of experts: int64 [N] tokens, int64 [N] places among a token's experts, N outcomes."""
        assert quantized.hints is not None
        at = rows * self._experts + slots
        self._hints.view(torch.int16)[at] = quantized.hints.view(torch.int16)
        self._scales[at] = quantized.scales
        self._global_scale[at] = quantized.global_scale
        if self._codes.shape[1]:
            self._codes[at] = quantized.codes

    @property
    def quantized(self) -> nvfp4.Quantized:
        """T * K rows, without codes (width 0) unless they were asked for."""
        return nvfp4.Quantized(self._codes, self._scales, self._global_scale, self._hints)
