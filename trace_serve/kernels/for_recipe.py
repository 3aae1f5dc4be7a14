"""Kernels bound to a recipe.

Each operand gets the fast backend where that implements the recipe's choices, and the reference where it does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import RecipeError, ShapeError
from trace_serve.kernels.base import Kernels, get_kernels
from trace_serve.kernels.checks import check_rows
from trace_serve.nvfp4 import Operand, Quantized
from trace_serve.recipe import Recipe


class RecipeKernels:
    """What an engine under `recipe` rounds: expert inputs, expert weights, K and V.

    Args:
        recipe: the numeric choices.
        fast: the backend to prefer for every operand whose rules it implements.
    """

    def __init__(self, recipe: Recipe, fast: Kernels) -> None:
        self.recipe = recipe
        self._fast = fast
        self._rules = {operand: nvfp4.rules(recipe, operand) for operand in nvfp4.OPERANDS}
        reference = get_kernels("reference")
        self._kernels = {
            operand: fast if fast.implements(rules) else reference for operand, rules in self._rules.items()
        }

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
        return self._kernels[operand].name

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
        return self._kernels["activations"].quantize_rows(
            x,
            rules=self._rules["activations"],
            rotation=self.recipe.expert_rotation,
            global_scale=static_scale,
            hints=hints,
            counters=counters,
        )

    def fake_quantize_activations(
        self, x: Tensor, *, static_scale: float | None = None, hints: bool = False, counters: Tensor | None = None
    ) -> tuple[Tensor, Quantized]:
        """`quantize_activations` and the values it keeps, as bfloat16 [N, K]: exact if `recipe.exact_in_bf16`."""
        self._check_static(static_scale)
        return self._kernels["activations"].fake_quantize_rows(
            x,
            rules=self._rules["activations"],
            rotation=self.recipe.expert_rotation,
            global_scale=static_scale,
            hints=hints,
            counters=counters,
        )

    def fake_quantize_weight(self, weight: Tensor, *, parts: int = 1, counters: Tensor | None = None) -> Tensor:
        """The NVFP4 image of one expert's matrix, rotated as the recipe says: bfloat16, exact if `exact_in_bf16`.

        Args:
            weight: bfloat16 or float32 [N, K]; gate rows before up rows.
            parts: 2 for gate and up, 1 for a single projection.
            counters: int64 [3], incidents are added in place.

        Raises:
            ShapeError: wrong rank, dtype or K, or N not a multiple of `parts`.
        """
        images = [image for image, _ in self._rounded_weight(weight, parts, counters)]
        return torch.cat(images) if len(images) > 1 else images[0]

    def quantize_weight(self, weight: Tensor, *, parts: int = 1, counters: Tensor | None = None) -> Quantized:
        """The codes and scales of which `fake_quantize_weight` is the image, with one global scale a row.

        Args and errors are those of `fake_quantize_weight`.
        """
        kept = [quantized for _, quantized in self._rounded_weight(weight, parts, counters)]
        rows = [q.global_scale.expand(q.codes.shape[0]) for q in kept]
        return Quantized(torch.cat([q.codes for q in kept]), torch.cat([q.scales for q in kept]), torch.cat(rows))

    def _rounded_weight(self, weight: Tensor, parts: int, counters: Tensor | None) -> list[tuple[Tensor, Quantized]]:
        """Image and codes of each group of rows that shares a global scale."""
        if weight.dim() != 2 or parts < 1 or weight.shape[0] % parts:
            raise ShapeError(
                f"weight: got shape {tuple(weight.shape)}, expected [N, K] with N a multiple of {parts} parts",
                field="weight",
            )
        check_rows(weight, self.recipe.expert_rotation, None)
        rotated = nvfp4.rotate(weight, self.recipe.expert_rotation)
        out = []
        for rows in rotated.chunk(parts) if self.recipe.gate_up_scale == "split" else (rotated,):
            scale = nvfp4.matrix_global_scale(rows, self.recipe)
            rounded = self._kernels["weights"].fake_quantize_rows(
                rows,
                rules=self._rules["weights"],
                global_scale=float(scale.decode),
                encode_scale=None if scale.encode is None else float(scale.encode),
                counters=counters,
            )
            out.append(rounded)
        return out

    def quantize_kv(
        self, x: Tensor, *, global_scale: float, rotation: int = 0, hints: bool = False, counters: Tensor | None = None
    ) -> Quantized:
        """Quantizes rows [N, D] of K (with `recipe.k_rotation`) or V under a scale of `recipe.kv_scales(layer)`.

        Raises:
            ShapeError: as `Kernels.quantize_rows`.
        """
        return self._kernels["kv"].quantize_rows(
            x,
            rules=self._rules["kv"],
            rotation=rotation,
            global_scale=global_scale,
            hints=hints,
            counters=counters,
        )

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
