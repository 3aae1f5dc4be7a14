"""Rows scaled by a gate: the norm behind gated delta net attention, and the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.engine.cpu_fallback.pointwise import sigmoid, silu


def rms_norm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    """RMS norm of each row, then its product with the activated gate.

    Args:
        x: [N, D].
        weight: [D].
        gate: [N, D].
        eps: added to the mean square.
        activation: of the gate: `silu` (also called `swish`) or `sigmoid`.

    Returns:
        [N, D] in the dtype of `x`. The normed row is rounded to it before the weight, as Hugging Face's module does.

    Raises:
        NotImplementedError: another activation.
    """
    if activation not in ("silu", "swish", "sigmoid"):
        raise NotImplementedError(f"rms_norm_gated: got activation {activation!r}, expected silu, swish or sigmoid")
    rows = x.float()
    normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    gates = sigmoid(gate) if activation == "sigmoid" else silu(gate)
    return ((weight * normed).float() * gates).to(x.dtype)


def scale_by_sigmoid_gate(x: Tensor, gate_weight: Tensor, rows: Tensor, out: Tensor, *, add: bool) -> None:
    """The shared expert's contribution: sigmoid(x . gate_weight) * rows, in FP32 and rounded once into `out`.

    Args:
        x: [T, H], the layer's input.
        gate_weight: [H].
        rows: [T, H], the shared expert's output.
        out: [T, H], changed in place.
        add: whether the contribution is added to `out` or replaces it.
    """
    gates = sigmoid((x.float() * gate_weight.float()).sum(-1, keepdim=True))
    scaled = gates * rows.float()
    out.copy_(out.float() + scaled if add else scaled)
