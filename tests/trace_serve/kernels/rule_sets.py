"""Recipes' rules, one by one and in every combination, and rows that tell them apart."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from trace_serve import nvfp4
from trace_serve.nvfp4 import Rules
from trace_serve.recipe import CHOICES, PRESETS

GB200, PAPER = (nvfp4.rules(PRESETS[name], "activations") for name in ("gb200", "paper"))
GB200_KV = nvfp4.rules(PRESETS["gb200"], "kv")
PAPER_WEIGHTS = nvfp4.rules(PRESETS["paper"], "weights")
EVERY = [
    Rules(formula, reciprocal, ties, zero_block, False, False, token_scale, scale_max)
    for formula, reciprocal, ties, zero_block in product(
        *(CHOICES[name] for name in ("scale_formula", "reciprocal", "ties", "zero_block"))
    )
    for token_scale, scale_max in (("pow2_per_token", 256.0), ("per_token", 448.0))
    if not (zero_block == "saturate" and reciprocal == "divide")
]
"""Every combination of the choices of a block, half of them with each kind of token scale."""

NAMED = {
    "gb200": GB200,
    "gb200 kv": GB200_KV,
    "paper": PAPER,
    "vllm": Rules("s_times_amax_sixth", "exact", "even", "min_subnormal", False, False, "per_token", 448.0),
    "modelopt": Rules("amax_over_six_g", "divide", "even", "one", False, False),
    "ties up": Rules("amax_times_sixth", "exact", "up", "zero", False, False),
    "256": Rules("amax_over_six", "exact", "even", "zero", False, False, "per_token", 256.0),
}
by_name = pytest.mark.parametrize("rules", NAMED.values(), ids=NAMED)


def awkward_rows(k: int) -> torch.Tensor:
    """Ordinary, zero, negative-zero, tiny, huge, mixed and damaged rows."""
    x = torch.randn(12, k, generator=torch.Generator().manual_seed(7)) * torch.logspace(-2, 2, 12).unsqueeze(1)
    x[1] = 0
    x[2] = -0.0
    x[3] *= 1e-38
    x[4] *= 2.0**-140
    x[5] *= 1e36
    x[6, : k // 2] *= 1e-9
    x[7, ::16] = 6.0
    x[7, 1::16] = 2.5
    x[8, 3] = float("nan")
    x[9, k - 1] = float("-inf")
    x[10] = torch.tensor([6.0, 0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5.0]).repeat(k // 8)
    return x
