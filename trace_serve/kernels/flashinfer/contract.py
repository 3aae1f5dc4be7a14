"""Every FlashInfer function that this package calls, with the parameters it passes, checked against what is installed.

Calls go through `Call.__call__`, which accepts exactly the listed parameters, by name: the list cannot fall behind the
code, and a FlashInfer that renamed, removed or added a required parameter is refused before anything is launched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from trace_serve.errors import EngineError

DISTRIBUTION = "flashinfer-python"
VERSION = "0.7.2"


@dataclass(frozen=True)
class Call:
    """One function of FlashInfer and the parameters we pass, all by name.

    Attributes:
        module: where it is imported from.
        name: its name there.
        parameters: what is passed, always all of it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]

    def __call__(self, **arguments: Any) -> Any:
        """Calls the function.

        Raises:
            EngineError: the installed FlashInfer does not have this signature.
            TypeError: arguments other than `parameters`; an error in this package.
        """
        if set(arguments) != set(self.parameters):
            odd = sorted(set(arguments) ^ set(self.parameters))
            raise TypeError(f"{self.name}: {', '.join(odd)} passed but not in the contract, or the reverse")
        return _verified(self)(**arguments)

    def problem(self) -> str:
        """Why the installed function cannot be called like this, naming function and parameter; empty if it can."""
        try:
            function = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError, OSError) as exc:
            return f"{self.module}.{self.name}: cannot be imported: {exc}"
        known = inspect.signature(function).parameters
        for name in self.parameters:
            if name not in known or known[name].kind in (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                return f"{self.module}.{self.name}: has no parameter {name!r}"
        for name, parameter in known.items():
            is_required = parameter.default is inspect.Parameter.empty and parameter.kind in (
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.KEYWORD_ONLY,
            )
            if is_required and name not in self.parameters:
                return f"{self.module}.{self.name}: requires parameter {name!r}, which is not passed"
        return ""


_CUTE = "flashinfer.fused_moe.cute_dsl"

MOE_SORT = Call(
    f"{_CUTE}.moe_utils",
    "moe_sort",
    (
        "token_selected_experts",
        "token_final_scales",
        "num_experts",
        "top_k",
        "local_expert_offset",
        "num_local_experts",
        "tile_tokens_dim",
        "enable_pdl",
    ),
)
GEMM1 = Call(
    f"{_CUTE}.blockscaled_contiguous_gather_grouped_gemm_act_fusion",
    "blockscaled_contiguous_gather_grouped_gemm_act_fusion",
    (
        "a",
        "b",
        "a_scale",
        "b_scale",
        "alpha",
        "tile_idx_to_expert_idx",
        "tile_idx_to_mn_limit",
        "token_id_mapping",
        "num_non_exiting_tiles",
        "a_per_token_scale",
        "topk",
        "a_dtype",
        "b_dtype",
        "sf_dtype",
        "c_dtype",
        "sf_vec_size",
        "quantize_output",
        "mma_tiler_mn",
        "cluster_shape_mn",
        "enable_pdl",
        "activation_type",
        "gated",
    ),
)
GEMM2 = Call(
    f"{_CUTE}.blockscaled_contiguous_grouped_gemm_finalize_fusion",
    "blockscaled_contiguous_grouped_gemm_finalize_fusion",
    (
        "a",
        "b",
        "a_scale",
        "b_scale",
        "alpha",
        "tile_idx_to_expert_idx",
        "num_non_exiting_tiles",
        "tile_idx_to_mn_limit",
        "permuted_idx_to_expanded_idx",
        "token_final_scales",
        "out",
        "a_per_token_scale",
        "a_dtype",
        "b_dtype",
        "sf_dtype",
        "out_dtype",
        "sf_vec_size",
        "mma_tiler_mn",
        "cluster_shape_mn",
        "enable_pdl",
        "use_fused_finalize",
    ),
)
UNPERMUTE = Call(
    f"{_CUTE}.blackwell.moe_finalize",
    "moe_unpermute",
    (
        "permuted_input",
        "output",
        "expanded_idx_to_permuted_idx",
        "topk_scales",
        "num_tokens",
        "top_k",
        "enable_pdl",
        "input_is_expanded",
    ),
)
FUSED_MOE = Call(
    f"{_CUTE}.fused_moe",
    "cute_dsl_fused_moe",
    (
        "x",
        "x_sf",
        "token_selected_experts",
        "token_final_scales",
        "w1_weight",
        "w1_weight_sf",
        "w1_alpha",
        "fc2_input_scale",
        "w2_weight",
        "w2_weight_sf",
        "w2_alpha",
        "num_experts",
        "top_k",
        "num_local_experts",
        "local_expert_offset",
        "output_dtype",
        "use_fused_finalize",
        "activation_type",
        "quant_mode",
        "per_token_scale",
        "tactic",
    ),
)
MMA_SCALES = Call(
    "flashinfer.cute_dsl.utils", "convert_sf_to_mma_layout", ("sf", "m", "k", "num_groups", "sf_vec_size")
)
DECODE = Call(
    "flashinfer.decode",
    "trtllm_batch_decode_with_kv_cache",
    (
        "query",
        "kv_cache",
        "workspace_buffer",
        "block_tables",
        "seq_lens",
        "max_seq_len",
        "bmm1_scale",
        "bmm2_scale",
        "out",
        "kv_layout",
        "backend",
        "kv_cache_sf",
    ),
)

CALLS = (MOE_SORT, GEMM1, GEMM2, UNPERMUTE, FUSED_MOE, MMA_SCALES, DECODE)


@cache
def _verified(call: Call) -> Callable[..., Any]:
    problem = call.problem()
    if problem:
        raise EngineError(_refusal(problem))
    function: Callable[..., Any] = getattr(importlib.import_module(call.module), call.name)
    return function


def check_contract(calls: tuple[Call, ...] = CALLS) -> None:
    """Checks every call against the installed FlashInfer; imports it.

    Raises:
        EngineError: FlashInfer is missing, or one function is not as listed; the message names function and parameter.
    """
    for call in calls:
        problem = call.problem()
        if problem:
            raise EngineError(_refusal(problem))


def installed_version() -> str:
    """Version of the installed FlashInfer; empty if there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _refusal(problem: str) -> str:
    version = installed_version()
    installed = f"{DISTRIBUTION} {version} is installed" if version else f"{DISTRIBUTION} is not installed"
    return f"flashinfer: {problem} ({installed}); install {DISTRIBUTION}=={VERSION}"
