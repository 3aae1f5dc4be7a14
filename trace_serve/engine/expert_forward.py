"""The forward pass of one layer's experts under a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from trace_serve import nvfp4
from trace_serve.engine import state
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
            x, static_scale=recipe.experts_in_scale(layer.layer_id), hints=kept, counters=engine.counters
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
    in FP32 in the order of their index.
    """
    engine = state.get()
    out = torch.zeros(x.shape[0], layer.w2_weight.shape[1], dtype=torch.float32)
    kept = recipe.experts == "w4a4" and engine.keeps("experts_mid", layer.layer_id)
    outcomes = MiddleOutcomes(topk_ids, layer.w2_weight.shape[2]) if kept else None
    for expert in torch.unique(topk_ids).tolist():
        if expert < 0:
            continue
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], layer.w13_weight[expert]).float().chunk(2, dim=-1)
        middle = (silu(gate) * up).to(x.dtype)
        if recipe.experts == "w4a4":
            middle, quantized = engine.kernels.fake_quantize_activations(
                middle, static_scale=recipe.experts_mid_scale(layer.layer_id), hints=kept, counters=engine.counters
            )
            if outcomes is not None:
                outcomes.add(rows, slots, quantized)
        else:
            middle = _rotated(recipe, middle)
        product = linear(middle, layer.w2_weight[expert])
        out.index_add_(0, rows, product.float() * topk_weights[rows, slots].float().unsqueeze(-1))
    if outcomes is not None:
        engine.capture("experts_mid", layer.layer_id, outcomes.quantized)
    return out.to(x.dtype)


class MiddleOutcomes:
    """Gathers the outcomes of all routed experts of one layer, a token's experts in the order of the router.

    Args:
        topk_ids: int [T, K]; the row of a negative id stays zero.
        intermediate: values of one expert's row, a multiple of 16.
    """

    def __init__(self, topk_ids: Tensor, intermediate: int) -> None:
        tokens, experts = topk_ids.shape
        blocks = intermediate // BLOCK
        self._experts = experts
        self._hints = torch.zeros(tokens * experts, blocks, dtype=torch.uint16)
        self._scales = torch.zeros(tokens * experts, blocks, dtype=torch.uint8)
        self._global_scale = torch.ones(tokens * experts)

    def add(self, rows: Tensor, slots: Tensor, quantized: nvfp4.Quantized) -> None:
        """Takes one expert's rows: int64 [N] tokens, int64 [N] places among a token's experts, N outcomes."""
        assert quantized.hints is not None
        at = rows * self._experts + slots
        self._hints.view(torch.int16)[at] = quantized.hints.view(torch.int16)
        self._scales[at] = quantized.scales
        self._global_scale[at] = quantized.global_scale

    @property
    def quantized(self) -> nvfp4.Quantized:
        """T * K rows; codes are not kept."""
        none = torch.empty(self._scales.shape[0], 0, dtype=torch.uint8)
        return nvfp4.Quantized(none, self._scales, self._global_scale, self._hints)
