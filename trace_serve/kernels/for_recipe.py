"""Kernels bound to a recipe.

Each operand gets the fast backend where that implements the recipe's choices, and the reference where it does not.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import RecipeError, ShapeError
from trace_serve.kernels.base import Kernels, get_kernels
from trace_serve.kernels.checks import check_rows
from trace_serve.nvfp4 import Operand, Quantized
from trace_serve.recipe import E4M3_MAX, Recipe


class RecipeKernels:
    """What an engine under `recipe` rounds: expert inputs, expert weights, K and V.

    Args:
        recipe: the numeric choices.
        fast: a backend that implements the default recipe's block rules.
    """

    def __init__(self, recipe: Recipe, fast: Kernels) -> None:
        self.recipe = recipe
        self._fast = fast
        pow2_aims_at_448 = recipe.global_scale_max == E4M3_MAX
        portable = {operand: nvfp4.rules(recipe, operand).is_portable for operand in nvfp4.OPERANDS}
        # A fast backend takes the scale of a token itself, so that choice has to be its own too.
        portable["activations"] &= (
            recipe.activation_global_scale == "pow2_per_token" and pow2_aims_at_448
        ) or recipe.activation_global_scale == "per_tensor_static"
        portable["weights"] &= recipe.weight_global_scale == "pow2_per_expert"
        self._portable = portable

    @property
    def name(self) -> str:
        """The fast backend's name; with `reference` beside it if some operand of the recipe needs that."""
        used: dict[Operand, bool] = {
            "activations": self.recipe.experts == "w4a4",
            "weights": self.recipe.experts != "bf16",
            "kv": self.recipe.kv != "bf16",
        }
        names = {self.backend_of(operand) for operand, is_used in used.items() if is_used}
        return "+".join(sorted(names)) or self._fast.name

    def backend_of(self, operand: Operand) -> str:
        """Name of the backend that quantizes an operand: `activations`, `weights` or `kv`."""
        return self._fast.name if self._portable[operand] else "reference"

    def quantize_activations(
        self, x: Tensor, *, static_scale: float | None = None, hints: bool = False, counters: Tensor | None = None
    ) -> Quantized:
        """Rotates rows as the recipe says and quantizes them.

        Args:
            x: bfloat16 or float32 [N, K]; N may be 0.
            static_scale: `recipe.experts_in_scale(layer)` or `recipe.experts_mid_scale(layer)`.
            hints: whether to return the lowest bit of every code too.
            counters: int64 [3], incidents are added in place.

        Raises:
            RecipeError: the static scale is missing, or the recipe has none.
            ShapeError: as `Kernels.quantize_rows`.
        """
        self._check_static(static_scale)
        width = self.recipe.expert_rotation
        if self._portable["activations"]:
            return self._fast.quantize_rows(
                x, rotation=width, global_scale=static_scale, hints=hints, counters=counters
            )
        check_rows(x, width, static_scale)
        rotated = nvfp4.rotate(x, width)
        kept = nvfp4.quantize_tokens(rotated, self.recipe, static_scale=static_scale, counters=counters)
        return dataclasses.replace(kept, hints=nvfp4.hint_bits(kept.codes)) if hints else kept

    def fake_quantize_activations(
        self, x: Tensor, *, static_scale: float | None = None, hints: bool = False, counters: Tensor | None = None
    ) -> tuple[Tensor, Quantized]:
        """`quantize_activations` and the values it keeps, as bfloat16 [N, K]: exact if `recipe.exact_in_bf16`."""
        self._check_static(static_scale)
        if self._portable["activations"]:
            return self._fast.fake_quantize_rows(
                x,
                rotation=self.recipe.expert_rotation,
                global_scale=static_scale,
                hints=hints,
                counters=counters,
            )
        kept = self.quantize_activations(x, static_scale=static_scale, hints=hints, counters=counters)
        return nvfp4.dequantize(kept, torch.bfloat16), kept

    def fake_quantize_weight(self, weight: Tensor, *, parts: int = 1, counters: Tensor | None = None) -> Tensor:
        """The NVFP4 image of one expert's matrix, rotated as the recipe says: bfloat16, exact if `exact_in_bf16`.

        Args:
            weight: bfloat16 or float32 [N, K]; gate rows before up rows.
            parts: 2 for gate and up, 1 for a single projection.
            counters: int64 [3], incidents are added in place.

        Raises:
            ShapeError: wrong rank, dtype or K, or N not a multiple of `parts`.
        """
        if weight.dim() != 2 or parts < 1 or weight.shape[0] % parts:
            raise ShapeError(
                f"weight: got shape {tuple(weight.shape)}, expected [N, K] with N a multiple of {parts} parts",
                field="weight",
            )
        check_rows(weight, self.recipe.expert_rotation, None)
        rotated = nvfp4.rotate(weight, self.recipe.expert_rotation)
        if not self._portable["weights"]:
            return nvfp4.dequantize(
                nvfp4.quantize_weight(rotated, self.recipe, parts=parts, counters=counters), torch.bfloat16
            )
        images = []
        for rows in rotated.chunk(parts) if self.recipe.gate_up_scale == "split" else (rotated,):
            g = float(nvfp4.matrix_global_scale(rows, self.recipe).decode)
            images.append(self._fast.fake_quantize_rows(rows, global_scale=g, counters=counters)[0])
        return torch.cat(images) if len(images) > 1 else images[0]

    def quantize_kv(
        self, x: Tensor, *, global_scale: float, rotation: int = 0, hints: bool = False, counters: Tensor | None = None
    ) -> Quantized:
        """Quantizes rows [N, D] of K (with `recipe.k_rotation`) or V under a scale of `recipe.kv_scales(layer)`.

        Raises:
            ShapeError: as `Kernels.quantize_rows`.
        """
        if self._portable["kv"]:
            return self._fast.quantize_rows(
                x, rotation=rotation, global_scale=global_scale, hints=hints, counters=counters
            )
        check_rows(x, rotation, global_scale)
        g = torch.full((x.shape[0],), global_scale, dtype=torch.float32, device=x.device)
        kept = nvfp4.quantize(nvfp4.rotate(x, rotation), g, self.recipe, operand="kv", counters=counters)
        return dataclasses.replace(kept, hints=nvfp4.hint_bits(kept.codes)) if hints else kept

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        """As `Kernels.gather_dequantize`: what a code stands for is the same under every recipe."""
        return self._fast.gather_dequantize(codes, scales, index, global_scale)

    def hint_bits(self, codes: Tensor) -> Tensor:
        """As `Kernels.hint_bits`."""
        return self._fast.hint_bits(codes)

    def _check_static(self, static_scale: float | None) -> None:
        is_static = self.recipe.activation_global_scale == "per_tensor_static"
        if is_static != (static_scale is not None):
            raise RecipeError(
                f"recipe activation_global_scale: {self.recipe.activation_global_scale!r} "
                + ("needs static_scale" if is_static else "takes the scale from each token; leave static_scale out"),
                field="activation_global_scale",
            )


def kernels_for(recipe: Recipe, device: torch.device | str = "cpu", name: str = "auto") -> RecipeKernels:
    """The kernels of a recipe on a device.

    Args:
        recipe: the numeric choices; all of them are supported everywhere, at the reference's speed if need be.
        device: where the tensors will be.
        name: the backend to prefer, see `get_kernels`.

    Raises:
        ConfigError: unknown backend, or it cannot run on the device.
    """
    return RecipeKernels(recipe, get_kernels(name, device))
