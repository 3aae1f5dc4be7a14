"""The gated delta rule: linear attention whose state forgets by a gate and is corrected by a delta (arXiv 2412.06464).

With state S [Dk, Dv], decay exp(g), step beta, and q, k of unit length:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(Dk)

Prefill runs the same steps as decode, one token after the other and in FP32, and not in chunks: a chunk's result
depends on where it starts, so a prompt prefilled in pieces or continued from a cached prefix would round differently.
States are kept as [Dv, Dk], which is the order of SGLang's pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.engine.cpu_fallback.pointwise import sigmoid, softplus

_PAD_SLOT = -1
_NORM_EPS = 1e-6


def fused_gdn_gating_cpu(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and step size of each token and value head.

    Args:
        a_log: [H].
        a: [T, H].
        b: [T, H].
        dt_bias: [H].

    Returns:
        g = -exp(a_log) softplus(a + dt_bias), FP32 [1, T, H]; beta = sigmoid(b), rounded to the dtype of `b`, FP32
        [1, T, H].
    """
    g = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), sigmoid(b).to(b.dtype).float().unsqueeze(0)


def _unit(x: Tensor, heads: int) -> Tensor:
    """[..., Hk, D] to FP32 [..., heads, D] of unit length; each key head serves a group of value heads."""
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _NORM_EPS)
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token: state [..., Dv, Dk], changed in place, q and k [..., Dk], v [..., Dv], decay and beta [...]."""
    k = k.unsqueeze(-2)
    state *= decay[..., None, None]
    delta = (v - (state * k).sum(-1)) * beta.unsqueeze(-1)
    state += delta.unsqueeze(-1) * k
    return (state * q.unsqueeze(-2)).sum(-1)


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, None]:
    """Prefill of sequences that lie one after the other; each continues from its slot's state and leaves its own there.

    Args:
        q: [1, T, Hk, Dk].
        k: [1, T, Hk, Dk].
        v: [1, T, Hv, Dv], Hv a multiple of Hk.
        g: log of the decay, FP32 [1, T, Hv].
        beta: step size, [1, T, Hv].
        initial_state: [slots, Hv, Dv, Dk], changed in place. A new sequence's slot holds zeros.
        cu_seqlens: int [B + 1], bounds of the sequences.
        head_first: must be False.
        use_qk_l2norm_in_kernel: must be True: q and k are brought to unit length here.
        initial_state_indices: int [B], slot of each sequence; -1 is padding, whose output is zero.

    Returns:
        The output [1, T, Hv, Dv] in the dtype of `v`, None for the last states (they are in their slots) and None for
        the states at chunk boundaries, which are not kept.

    Raises:
        NotImplementedError: another layout, or q and k that are not to be normalised.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("chunk_gated_delta_rule_cpu: expected head_first=False, use_qk_l2norm_in_kernel=True")
    heads = v.shape[2]
    queries, keys, values = _unit(q[0], heads) * q.shape[-1] ** -0.5, _unit(k[0], heads), v[0].float()
    decay, steps = g[0].float().exp(), beta[0].float()
    out = torch.zeros_like(values)
    bounds = cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices.tolist()):
        if slot == _PAD_SLOT:
            continue
        state = initial_state[slot].float().contiguous()
        for t in range(bounds[i], bounds[i + 1]):
            out[t] = _step(state, queries[t], keys[t], values[t], decay[t], steps[t])
        initial_state[slot] = state.to(initial_state.dtype)
    return out.to(v.dtype).unsqueeze(0), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    a_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Decode: one token of each sequence, with its gates.

    Args:
        a_log, dt_bias: [Hv].
        q, k: [1, B, Hk, Dk].
        v: [1, B, Hv, Dv].
        a, b: [B, Hv], see `fused_gdn_gating_cpu`.
        initial_state_source: [slots, Hv, Dv, Dk], changed in place.
        initial_state_indices: int [B], slot of each sequence; -1 is padding, whose output is zero.
        cu_seqlens: int [B + 1]; must be one token a sequence.
        use_qk_l2norm_in_kernel: must be True.
        softplus_beta: must be 1.
        softplus_threshold: must be 20, above which softplus(x) is x.

    Returns:
        [1, B, Hv, Dv], dtype of `v`.

    Raises:
        NotImplementedError: several tokens a sequence, or another gate.
    """
    batch, heads = v.shape[1], v.shape[2]
    if cu_seqlens.shape[0] != batch + 1:
        raise NotImplementedError(
            f"fused_sigmoid_gating_delta_rule_update_cpu: got {batch} tokens of {cu_seqlens.shape[0] - 1} sequences, "
            "expected one each"
        )
    if not use_qk_l2norm_in_kernel or (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise NotImplementedError(
            "fused_sigmoid_gating_delta_rule_update_cpu: expected use_qk_l2norm_in_kernel=True, softplus_beta=1 and "
            "softplus_threshold=20"
        )
    g, beta = fused_gdn_gating_cpu(a_log, a, b, dt_bias)
    rows = (initial_state_indices != _PAD_SLOT).nonzero().flatten()
    slots = initial_state_indices[rows].long()
    state = initial_state_source[slots].float()
    queries, keys = _unit(q[0, rows], heads) * q.shape[-1] ** -0.5, _unit(k[0, rows], heads)
    out = torch.zeros_like(v)
    out[0, rows] = _step(state, queries, keys, v[0, rows].float(), g[0, rows].exp(), beta[0, rows]).to(v.dtype)
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return out
