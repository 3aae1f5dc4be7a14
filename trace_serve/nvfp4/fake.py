"""Fake quantization: the values that NVFP4 keeps, in the dtype of the input, with the straight-through gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trace_serve.nvfp4.block_scale import Operand
from trace_serve.nvfp4.quantize import dequantize, quantize, quantize_tokens, quantize_weight
from trace_serve.recipe import Recipe


class _StraightThrough(Function):
    """Forward: `values`, computed from `x`; backward: the gradient passes to `x` unchanged (Bengio et al., 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(x: Tensor, values: Tensor) -> Tensor:
    """`values` in the forward pass; in the backward pass as if they were `x`. Same shape and dtype."""
    out: Tensor = _StraightThrough.apply(x, values)
    return out


def fake_quantize(
    x: Tensor,
    global_scale: Tensor | float,
    recipe: Recipe,
    *,
    operand: Operand = "activations",
    encode_scale: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """The values that `quantize` keeps, in the shape and dtype of `x`. Raises as `quantize` does."""
    kept = quantize(x.detach(), global_scale, recipe, operand=operand, encode_scale=encode_scale, counters=counters)
    return straight_through(x, dequantize(kept, x.dtype))


def fake_quantize_tokens(
    x: Tensor, recipe: Recipe, *, static_scale: float | None = None, counters: Tensor | None = None
) -> Tensor:
    """The values that `quantize_tokens` keeps, in the shape and dtype of `x`. Raises as `quantize_tokens` does."""
    kept = quantize_tokens(x.detach(), recipe, static_scale=static_scale, counters=counters)
    return straight_through(x, dequantize(kept, x.dtype))


def fake_quantize_weight(weight: Tensor, recipe: Recipe, *, parts: int = 1, counters: Tensor | None = None) -> Tensor:
    """The values that `quantize_weight` keeps, in the shape and dtype of `weight`. Raises as `quantize_weight` does."""
    kept = quantize_weight(weight.detach(), recipe, parts=parts, counters=counters)
    return straight_through(weight, dequantize(kept, weight.dtype))
