"""A stand-in for the compiled `sgl_kernel` module on a machine where its CUDA build cannot load.

Implements in torch what plain decoding executes and nothing else: every other name that SGLang imports exists, so
that its modules load, and raises when called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

_RAISING = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
"""Imported at module level by SGLang on a CPU; only speculative decoding and slot moves call them."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes each request's new KV slots into its row of the request-to-token table.

    Args:
        req_pool_indices: int [B], row of each request.
        req_to_token: int32 [rows, pool_len], changed in place.
        start_offset: int [B], first column to write.
        end_offset: int [B], one past the last column.
        out_cache_loc: int [sum(end - start)], slots of all requests, one after the other.
        pool_len: columns of `req_to_token`.
    """
    position = 0
    slots = out_cache_loc.to(req_to_token.dtype)
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        if end > pool_len:
            raise ValueError(f"assign_req_to_token_pool_cpu: end offset {end} is past the table's {pool_len} columns")
        req_to_token[row, start:end] = slots[position : position + end - start]
        position += end - start


def _raising(name: str) -> Callable[..., NoReturn]:
    def unavailable(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} has no CPU implementation here: install a CPU build of sgl_kernel, "
            "or switch off the feature that calls it"
        )

    unavailable.__name__ = name
    return unavailable


class _NoSubmodules(importlib.abc.MetaPathFinder):
    """Makes `import sgl_kernel.x` an ImportError, which SGLang's callers handle, instead of a broken CUDA load."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("sgl_kernel."):
            raise ModuleNotFoundError(f"No module named {fullname!r} on the CPU engine", name=fullname)
        return None


def install() -> None:
    """Puts the stand-in into `sys.modules`; the real package is not touched."""
    module: Any = types.ModuleType("sgl_kernel", "Torch stand-in supplied by trace_serve for the CPU engine")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    module.__version__ = "0"
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    for name in _RAISING:
        setattr(module, name, _raising(name))
    sys.modules["sgl_kernel"] = module
    sys.meta_path.insert(0, _NoSubmodules())
