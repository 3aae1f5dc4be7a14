"""The short causal convolution in front of linear attention, over packed sequences and for one new token each.

A sequence's state is the last `width - 1` inputs of every channel. The convolution is depthwise, in the inputs' dtype
with FP32 accumulation left to torch, as in Hugging Face's modules, so that prefill and decode round alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from trace_serve.engine.cpu_fallback.pointwise import silu

_PAD_SLOT = -1


def _convolve(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """window [B, C, width - 1 + T] to [B, C, T]."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d: got activation {activation!r}, expected silu or none")
    out = conv1d(window.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return (out if activation is None else silu(out)).to(window.dtype)


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor | None,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int] | Tensor,
) -> Tensor:
    """Convolves sequences that lie one after the other, and keeps each one's last inputs.

    Args:
        x: [C, T], any float dtype.
        weight: [C, width].
        bias: [C], or None.
        activation: `silu`, or None.
        conv_states: [slots, C, width - 1], changed in place.
        has_initial_state: bool [B]; where False, the sequence starts from zeros. None is False for all.
        cache_indices: int [B], slot of each sequence; -1 is padding, whose output is zero.
        query_start_loc: int [B + 1], bounds of the sequences in `x`.
        seq_lens_cpu: lengths of the sequences; not used, the bounds say the same.

    Returns:
        [C, T], dtype of `x`.
    """
    state_len = weight.shape[1] - 1
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    bounds = query_start_loc.tolist()
    slots = cache_indices.tolist()
    continues = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    for i, (slot, continued) in enumerate(zip(slots, continues, strict=True)):
        start, end = bounds[i], bounds[i + 1]
        if slot == _PAD_SLOT or start == end:
            continue
        past = conv_states[slot] if continued else torch.zeros_like(conv_states[slot])
        window = torch.cat([past.to(x.dtype), x[:, start:end]], dim=-1)
        out[:, start:end] = _convolve(window.unsqueeze(0), weight, bias, activation)[0]
        conv_states[slot] = window[:, -state_len:].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolves one new token of each sequence, and shifts it into the sequence's state.

    Args:
        x: [B, C].
        conv_states: [slots, C, width - 1], changed in place.
        weight: [C, width].
        bias: [C], or None.
        activation: `silu`, or None.
        conv_state_indices: int [B], slot of each sequence; -1 is padding, whose output is zero.

    Returns:
        [B, C], dtype of `x`.

    Raises:
        NotImplementedError: `x` holds several tokens a sequence, as speculative decoding has them.
    """
    if x.dim() != 2:
        raise NotImplementedError(f"causal_conv1d_update_cpu: got x of {x.dim()} dimensions, expected [B, C]")
    rows = (conv_state_indices != _PAD_SLOT).nonzero().flatten()
    slots = conv_state_indices[rows].long()
    window = torch.cat([conv_states[slots].to(x.dtype), x[rows].unsqueeze(-1)], dim=-1)
    out = torch.zeros_like(x)
    out[rows] = _convolve(window, weight, bias, activation)[..., 0]
    conv_states[slots] = window[..., 1:].to(conv_states.dtype)
    return out
