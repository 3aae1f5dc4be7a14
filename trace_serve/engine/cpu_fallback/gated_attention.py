"""What Qwen3.5's layers do between their projections and their attention: norms of q and k, gates, and splits."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.engine.cpu_fallback.pointwise import sigmoid


def _gemma_rms_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    """[..., n * head_dim] to [rows, head_dim]: x / rms(x) * (1 + weight) in FP32, rounded once."""
    heads = x.reshape(-1, head_dim).float()
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """RMS norm of every head of q and k, with weights stored as their difference from one.

    Args:
        q: [T, H * D].
        k: [T, Hk * D].
        q_weight, k_weight: [D].
        eps: added to the mean square.
        head_dim: D.

    Returns:
        [T * H, D] and [T * Hk, D] in the dtypes of `q` and `k`.
    """
    return _gemma_rms_norm(q, q_weight, eps, head_dim), _gemma_rms_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_qk_gemma_rmsnorm_cpu` of a projection that holds each head's query and gate side by side.

    Args:
        q_gate: [T, H * 2 * D]; of every head first D values of q, then D of its gate.
        k: [T, Hk * D].
        q_weight, k_weight: [D].
        eps: added to the mean square.
        head_dim: D.
        num_heads: H.

    Returns:
        q [T * H, D], k [T * Hk, D] and the gate [T * H, D], which is not normed, each contiguous.
    """
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q_normed, k_normed = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q_normed, k_normed, gate.reshape(-1, head_dim).contiguous()


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiplies x [T, H * D] by sigmoid(gate) in place; gate is [T, H * D] or [T, H, D]."""
    x.copy_(x.float() * sigmoid(gate.reshape(x.shape)))


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits the two input projections of a gated delta net layer.

    Args:
        qkvz: [T, 2 * Hk * Dk + 2 * Hv * Dv]: q, k, v and z one after the other.
        ba: [T, 2 * Hv]: b, then a.
        num_k_heads: Hk.
        num_v_heads: Hv.
        head_k_dim: Dk.
        head_v_dim: Dv.

    Returns:
        q, k and v together [T, 2 * Hk * Dk + Hv * Dv], z [T, Hv, Dv], b [T, Hv] and a [T, Hv], each contiguous.
    """
    values = num_v_heads * head_v_dim
    qkv, z = torch.split(qkvz, [2 * num_k_heads * head_k_dim + values, values], dim=-1)
    b, a = torch.split(ba, [num_v_heads, num_v_heads], dim=-1)
    return qkv.clone(), z.reshape(-1, num_v_heads, head_v_dim).clone(), b.clone(), a.clone()
