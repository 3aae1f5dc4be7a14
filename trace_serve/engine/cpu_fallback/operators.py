"""Registration of the stand-ins that SGLang looks up as `torch.ops.sgl_kernel.*`."""

from __future__ import annotations

from typing import Any

import torch

from trace_serve.engine.cpu_fallback import gated_attention, gated_delta_rule

_OPERATORS = (
    (
        "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        gated_delta_rule.fused_gdn_gating_cpu,
    ),
    (
        "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, "
        "Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor",
        gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
    ),
    ("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()", gated_attention.fused_sigmoid_mul_cpu),
    (
        "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) "
        "-> (Tensor, Tensor)",
        gated_attention.fused_qk_gemma_rmsnorm_cpu,
    ),
    (
        "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
        "int head_dim, int num_heads) -> (Tensor, Tensor, Tensor)",
        gated_attention.fused_qk_gemma_rmsnorm_with_gate_cpu,
    ),
    (
        "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int num_k_heads, int num_v_heads, "
        "int head_k_dim, int head_v_dim) -> (Tensor, Tensor, Tensor, Tensor)",
        gated_attention.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    ),
)
"""Schemas are those of the call sites: an argument that only another feature passes is refused by name."""

_libraries: list[Any] = []


def register() -> None:
    """Registers every operator once a process; they live as long as it does."""
    if _libraries:
        return
    new_library: Any = torch.library.Library
    library = new_library("sgl_kernel", "FRAGMENT")
    for schema, function in _OPERATORS:
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    _libraries.append(library)
