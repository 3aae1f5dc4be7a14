"""Sigmoid, SiLU and softplus whose value depends on their argument alone.

Torch computes the last elements of a tensor, those that do not fill a vector register, by another formula for these
three, so a token's result would depend on how many tokens share its pass. Its exp and log1p have no such seam.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SOFTPLUS_THRESHOLD = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in FP32."""
    return 1.0 / (1.0 + (-x.float()).exp())


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in FP32."""
    x = x.float()
    return x / (1.0 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in FP32; x itself above 20, where the two are the same number."""
    x = x.float()
    return torch.where(x > _SOFTPLUS_THRESHOLD, x, x.clamp(max=_SOFTPLUS_THRESHOLD).exp().log1p())
