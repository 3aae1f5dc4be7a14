"""Attention of an FP4 engine in place of SGLang's loop over sequences; a BF16 engine keeps SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import attention, state
from trace_serve.engine.hooks.base import Hook
from trace_serve.recipe import BLOCK

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_TENSORS = ("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens")
_EXTENT = ("extend_prefix_lens", "extend_seq_lens")
_OPTIONS = ("encoder_lens", "scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size")
_DECODE = (*_TENSORS, *_OPTIONS)
_EXTEND = (*_TENSORS, *_EXTENT, *_OPTIONS)


def _replaces(names: tuple[str, ...]) -> Callable[..., Any]:
    """A wrapper of the SGLang method with these parameters; what is not a decoder's plain attention stays with it."""

    def attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        query, output = call["query"], call["output"]
        queries = call.get("extend_seq_lens")
        plain = (
            call.get("encoder_lens") is None
            and call.get("sliding_window_size") is None
            and not call.get("is_cross_attn")
            and (queries is None or bool(call.get("causal")))
            and query.shape == output.shape
            and query.shape[-1] % BLOCK == 0
        )
        if state.get().spec.recipe.is_bf16 or not plain:
            return original(*args, **kwargs)
        batch = attention.Batch.of(call["req_to_token"], call["req_pool_indices"], call["seq_lens"], queries)
        scaling = call.get("scaling") or query.shape[-1] ** -0.5
        attention.attend(query, call["k_cache"], call["v_cache"], batch, scaling, output)
        return output

    return attend


HOOKS: tuple[Hook, ...] = (
    Hook(
        "attention-decode",
        f"{_BACKEND}._run_sdpa_forward_decode",
        HookType.AROUND,
        _replaces(_DECODE),
        "attention loops over sequences, and a row's bits depend on its batch",
        _DECODE,
    ),
    Hook(
        "attention-prefill",
        f"{_BACKEND}._run_sdpa_forward_extend",
        HookType.AROUND,
        _replaces(_EXTEND),
        "a row's bits depend on how its prompt was cut",
        _EXTEND,
    ),
)
