"""The guided mode in one Triton kernel; its definition is `quantize` in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trace_serve.guided.outcomes import Outcomes
from trace_serve.kernels.triton.follow import follow_rows, supports
from trace_serve.kernels.triton.quantize import QuantizedRows
from trace_serve.nvfp4.block_scale import Operand, rules
from trace_serve.recipe import BLOCK, Recipe


def fused(
    x: Tensor,
    outcomes: Outcomes,
    recipe: Recipe,
    *,
    operand: Operand,
    global_scale: Tensor | float | None,
    tau: float,
    values: bool,
) -> QuantizedRows | None:
    """Rows [N, K] of what `guided_quantize` keeps; None where the kernel does not compute the recipe or such long rows.

    Args:
        values: return the values that are kept too, as `follow_rows` does.
        x, outcomes, recipe, operand, global_scale, tau: as `guided_quantize`, which checks them.
    """
    token = rules(recipe, "activations")
    applied = replace(rules(recipe, operand), token_scale=token.token_scale, scale_max=token.scale_max)
    static = recipe.activation_global_scale == "per_tensor_static"
    if not supports(applied, x.shape[-1]) or (global_scale is None and static):
        return None
    blocks = x.shape[-1] // BLOCK

    def by_row(scale: Tensor | float | None) -> Tensor | None:
        if scale is None:
            return None
        given = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
        # The host does not wait for the device: a scale that cannot be used makes its rows NaN, as in `nvfp4.quantize`.
        return torch.where((given > 0) & given.isfinite(), given, torch.nan).expand(x.shape[:-1]).reshape(-1)

    return follow_rows(
        x.reshape(-1, x.shape[-1]),
        outcomes.bits.reshape(-1, blocks),
        None if outcomes.scales is None else outcomes.scales.reshape(-1, blocks),
        scale_kind=outcomes.scale_kind,
        rules=applied,
        tau=tau,
        global_scale=by_row(global_scale),
        rollout_scale=by_row(outcomes.global_scale),
        present=None if outcomes.present is None else outcomes.present.reshape(-1),
        values=values,
    )
