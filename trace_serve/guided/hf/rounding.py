"""What a trainer under a recipe does with the values that the engine rounds.

`Rounding` is the plug for other rules than the recipe's own nearest rounding, such as one that follows the hints of a
rollout (`trace_serve.guided`): `fake_quantize` takes any object that has its methods.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trace_serve import nvfp4
from trace_serve.recipe import Recipe


class Rounding(Protocol):
    """Rounds the operands of one model, forward pass by forward pass.

    Every `x` holds the values that the engine would quantize: already rotated, and then FP32, where the recipe rotates.
    What is returned has the shape of `x`, is the value that a kept code stands for, and is brought to the model's dtype
    by the caller; gradients pass if it lets them (`nvfp4.straight_through`). Layers that the recipe leaves in BF16 do
    not come here.
    """

    def begin(self, first: int, count: int) -> None:
        """A forward pass over positions `first` to `first + count - 1` of every sequence of the batch starts.

        Rows of experts are numbered sequence by sequence: row r of the pass is position `first + r % count`.
        """

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        """Inputs of the first product [T, H], once a token: the T rows of the pass."""

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Inputs of the second product [N, I] of one expert.

        Args:
            rows: int64 [N], the pass's rows that were routed to the expert.
            places: int64 [N], its place among the experts of each, in the order of the router.
        """

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        """K after position embedding [B, heads, T, D] of positions `first` to `first + T - 1`.

        A position comes once as long as its sequence goes on in the model's cache.
        """

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        """V likewise."""


class NearestRounding:
    """What the engine does by itself under the recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def begin(self, first: int, count: int) -> None:
        pass

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        return nvfp4.fake_quantize_tokens(x, self._recipe, static_scale=self._recipe.experts_in_scale(layer))

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        return nvfp4.fake_quantize_tokens(x, self._recipe, static_scale=self._recipe.experts_mid_scale(layer))

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        return nvfp4.fake_quantize(x, self._recipe.kv_scales(layer)[0], self._recipe, operand="kv")

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        return nvfp4.fake_quantize(x, self._recipe.kv_scales(layer)[1], self._recipe, operand="kv")


def rotated(x: Tensor, width: int) -> Tensor:
    """`x` in FP32 after a Hadamard rotation of this width; `x` itself for width 0."""
    return nvfp4.rotate(x, width) if width else x
