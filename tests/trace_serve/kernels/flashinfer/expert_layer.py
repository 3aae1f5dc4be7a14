"""A small layer of experts under a recipe, and the same computed directly: no layouts, no routing tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from trace_serve import nvfp4
from trace_serve.kernels import RecipeKernels, kernels_for
from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import Recipe

MID = 0.5
"""Static global scale at `experts_mid` of recipes that have one."""


@dataclass(frozen=True)
class Layer:
    kernels: RecipeKernels
    w13: Quantized
    w2: Quantized
    x: Quantized
    topk_ids: Tensor
    topk_weights: Tensor

    @property
    def mid_static_scale(self) -> float | None:
        return MID if self.kernels.recipe.activation_global_scale == "per_tensor_static" else None


def layer(
    recipe: Recipe,
    *,
    experts: int = 4,
    hidden: int = 128,
    intermediate: int = 128,
    tokens: int = 9,
    top_k: int = 2,
    device: str = "cpu",
    seed: int = 0,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    kernels = kernels_for(recipe, device)

    def weight(rows: int, k: int) -> Quantized:
        w = torch.randn(experts, rows, k, generator=generator) * 0.1
        w = nvfp4.rotate(w.to(torch.bfloat16).to(device), recipe.expert_rotation)
        kept = nvfp4.quantize_weight(w, recipe, parts=2 if rows == 2 * intermediate else 1)
        return Quantized(kept.codes, kept.scales, kept.global_scale[:, 0].contiguous())

    w13, w2 = weight(2 * intermediate, hidden), weight(hidden, intermediate)
    x = (torch.randn(tokens, hidden, generator=generator) * 4).to(torch.bfloat16).to(device)
    static = 0.25 if recipe.activation_global_scale == "per_tensor_static" else None
    quantized = kernels.quantize_activations(x, static_scale=static, hints=True)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(max(tokens, 1))])[:tokens]
    scores = torch.softmax(torch.randn(tokens, top_k, generator=generator), dim=-1)
    return Layer(kernels, w13, w2, quantized, ids.to(torch.int32).to(device), scores.to(device))


def _matrix(weight: Quantized, expert: int) -> Tensor:
    kept = Quantized(weight.codes[expert], weight.scales[expert], torch.ones(weight.codes.shape[1]))
    return nvfp4.dequantize(kept, torch.float32).double()


def middle_rows(layer: Layer) -> Tensor:
    """bfloat16 [T * top_k, I]: silu(gate) * up of each pair, before it is quantized."""
    x = nvfp4.dequantize(Quantized(layer.x.codes, layer.x.scales, torch.ones_like(layer.x.global_scale)), torch.float32)
    rows = []
    for token, expert in _pairs(layer):
        factor = layer.x.global_scale[token].double() * layer.w13.global_scale[expert].double()
        gate, up = ((x[token].double() @ _matrix(layer.w13, expert).T) * factor).chunk(2)
        rows.append((silu(gate) * up).to(torch.bfloat16))
    return torch.stack(rows)


def expected(layer: Layer) -> tuple[Tensor, Quantized]:
    """The layer's output, float32 [T, H], and what is rounded at `experts_mid`."""
    mid = layer.kernels.quantize_activations(middle_rows(layer), static_scale=layer.mid_static_scale, hints=True)
    values = nvfp4.dequantize(Quantized(mid.codes, mid.scales, torch.ones_like(mid.global_scale)), torch.float32)
    tokens, top_k = layer.topk_ids.shape
    out = torch.zeros(tokens, layer.w2.codes.shape[1])
    for pair, (token, expert) in enumerate(_pairs(layer)):
        factor = mid.global_scale[pair].double() * layer.w2.global_scale[expert].double()
        product = (values[pair].double() @ _matrix(layer.w2, expert).T) * factor
        out[token] += layer.topk_weights[token, pair % top_k] * product.to(torch.bfloat16).float()
    return out, mid


def _pairs(layer: Layer) -> list[tuple[int, int]]:
    top_k = layer.topk_ids.shape[1]
    return [(pair // top_k, expert) for pair, expert in enumerate(layer.topk_ids.flatten().tolist())]
