"""Plug for Transformer Engine, and so for Megatron: an NVFP4 quantizer that rounds inputs by the hints of a rollout.

    recipe = CustomRecipe(qfactory=quantizer_factory)

In Megatron: `fp4_recipe="custom"` and
`fp4_quantizer_factory="trace_serve.guided.plugs.transformer_engine.quantizer_factory"`.

What a quantizer keeps in place of its own codes has to be staged before each product (`stage`), since a quantizer sees
the rows of an expert without knowing their tokens. Without it, it is Transformer Engine's reference quantizer.

Only the row-wise image of inputs, the operand of the forward product, follows hints. The column-wise one, weights and
output gradients are the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trace_serve.errors import ConfigError
from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.quantize import guided_quantize
from trace_serve.guided.rule import TAU_ALIGNED
from trace_serve.recipe import Recipe

_REFERENCE = "transformer_engine.pytorch.custom_recipes.reference_nvfp4"
_FORMATS = "transformer_engine.pytorch.custom_recipes.reference_utils"

_AMAX_OF_SCALE = 6.0 * 448.0
"""Transformer Engine keeps the amax that a global scale is computed from: scale = amax / (6 * 448)."""


@dataclass(frozen=True)
class Staged:
    """What the next quantization follows: outcomes of its rows, the recipe, its static global scale or None."""

    outcomes: Outcomes
    recipe: Recipe
    global_scale: float | None = None
    tau: float = TAU_ALIGNED


class Hinted:
    """What is added to `NVFP4QuantizerRef`.

    Attributes:
        staged: used for one quantization and then forgotten, so that rows can never meet hints of other rows.
    """

    staged: Staged | None = None
    row_scaled_nvfp4: bool

    def _quantize(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Any, Any]:
        """[M, K] to codes [M, K/2], scales E4M3 [M, K/16], both of the transpose, and amax by rows and columns."""
        staged, self.staged = self.staged, None
        parent: Any = super()
        codes, scales, codes_t, scales_t, amax, amax_t = parent._quantize(tensor)
        if staged is None or codes is None:
            return codes, scales, codes_t, scales_t, amax, amax_t
        kept = guided_quantize(tensor, staged.outcomes, staged.recipe, global_scale=staged.global_scale, tau=staged.tau)
        own = kept.global_scale * _AMAX_OF_SCALE
        if not self.row_scaled_nvfp4:
            if own.numel() and bool((own != own[0]).any()):
                raise ConfigError(
                    "row_scaled_nvfp4: the recipe has a global scale a token; build the quantizer with "
                    "row_scaled_nvfp4=True",
                    field="row_scaled_nvfp4",
                )
            own = own[:1]
        return kept.codes, kept.scales.view(torch.float8_e4m3fn), codes_t, scales_t, own, amax_t


@cache
def quantizer_class() -> Any:
    """`NVFP4QuantizerRef` of the installed Transformer Engine with hints."""
    return type("HintedQuantizer", (Hinted, import_module(_REFERENCE).NVFP4QuantizerRef), {})


def quantizer_factory(role: Any) -> Any:
    """`qfactory` of `CustomRecipe`: quantizers with hints for the inputs of linear layers, the reference for the rest.

    Args:
        role: `QuantizerRole` or None.
    """
    linear = role is not None and role.module_type in ("linear", "grouped_linear")
    e2m1 = import_module(_FORMATS).Fp4Formats.E2M1
    if linear and role.tensor_type == "input":
        return quantizer_class()(dtype=e2m1, row_scaled_nvfp4=True)
    return import_module(_REFERENCE).NVFP4QuantizerRef(dtype=e2m1)


def stage(
    quantizers: Sequence[Hinted],
    splits: Sequence[int],
    outcomes: Outcomes,
    recipe: Recipe,
    *,
    global_scale: float | None = None,
    tau: float = TAU_ALIGNED,
) -> None:
    """Gives each expert's quantizer the outcomes of its rows.

    Args:
        quantizers: one an expert, in the order of the grouped product.
        splits: rows of each expert.
        outcomes: of all rows, grouped by expert; see `HintedRounding.outcomes`.
        recipe, global_scale, tau: as `guided_quantize`.

    Raises:
        ConfigError: other numbers of rows or quantizers.
    """
    total = outcomes.bits.shape[0]
    if len(quantizers) != len(splits) or sum(splits) != total:
        raise ConfigError(
            f"splits: got {sum(splits)} rows for {len(splits)} experts, expected {total} for {len(quantizers)}",
            field="splits",
        )
    start = 0
    for quantizer, count in zip(quantizers, splits, strict=True):
        mine = _rows(outcomes, slice(start, start + count))
        quantizer.staged = Staged(mine, recipe, global_scale, tau) if count else None
        start += count


def batch_rows(tokens: Tensor, batch: int, count: int) -> Tensor:
    """Rows as hints count them, sequence by sequence, of Megatron's tokens [T, B, H], counted position by position.

    Args:
        tokens: int64 [N], such as the dispatcher's `reversed_local_input_permutation_mapping`; -1 for padding.
        batch, count: B and T.
    """
    return torch.where(tokens < 0, tokens, (tokens % batch) * count + tokens // batch)


def _rows(outcomes: Outcomes, at: slice) -> Outcomes:
    def cut(each: Tensor | None) -> Tensor | None:
        return None if each is None else each[at]

    return replace(
        outcomes,
        bits=outcomes.bits[at],
        scales=cut(outcomes.scales),
        global_scale=cut(outcomes.global_scale),
        present=cut(outcomes.present),
        codes=cut(outcomes.codes),
    )
