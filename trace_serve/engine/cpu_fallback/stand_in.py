"""The modules `sgl_kernel` and `sgl_kernel.mamba` and `torch.ops.sgl_kernel.*`, put where SGLang looks for them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trace_serve.engine.cpu_fallback import causal_conv1d, gated_delta_rule, operators, request_table

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

_MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    "sgl_kernel": {"assign_req_to_token_pool_cpu": request_table.assign_req_to_token_pool_cpu},
    "sgl_kernel.mamba": {
        "causal_conv1d_fn_cpu": causal_conv1d.causal_conv1d_fn_cpu,
        "causal_conv1d_update_cpu": causal_conv1d.causal_conv1d_update_cpu,
        "chunk_gated_delta_rule_cpu": gated_delta_rule.chunk_gated_delta_rule_cpu,
    },
}


def raising(name: str) -> Callable[..., NoReturn]:
    """A function of that name that can be imported but not called."""

    def unavailable(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} has no CPU implementation here: install a CPU build of sgl_kernel, "
            "or switch off the feature that calls it"
        )

    unavailable.__name__ = name
    return unavailable


class _NoOtherSubmodules(importlib.abc.MetaPathFinder):
    """Makes `import sgl_kernel.x` an ImportError, which SGLang's callers handle, instead of a broken CUDA load."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("sgl_kernel."):
            raise ModuleNotFoundError(f"No module named {fullname!r} on the CPU engine", name=fullname)
        return None


def _module(name: str, functions: dict[str, Callable[..., Any]]) -> Any:
    module: Any = types.ModuleType(name, "Torch stand-in supplied by trace_serve for the CPU engine")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="." not in name)
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    return module


def install() -> None:
    """Puts the stand-ins into `sys.modules` and registers the operators; the real package is not touched."""
    modules = {name: _module(name, functions) for name, functions in _MODULES.items()}
    package = modules["sgl_kernel"]
    package.__path__ = []
    package.__version__ = "0"
    package.mamba = modules["sgl_kernel.mamba"]
    for name in _RAISING:
        setattr(package, name, raising(name))
    sys.modules.update(modules)
    sys.meta_path.insert(0, _NoOtherSubmodules())
    operators.register()
