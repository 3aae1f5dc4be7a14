"""Layers of gated delta net models on a CPU: what SGLang has only as a Triton kernel or for CPUs with AMX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import cpu_has_amx_support

from trace_serve.engine.cpu_fallback.gated_rows import rms_norm_gated, scale_by_sigmoid_gate
from trace_serve.engine.hooks.base import Hook


def _norm(original: Callable[..., Any], self: Any, x: Any, z: Any = None) -> Any:
    if x.device.type != "cpu" or cpu_has_amx_support():
        return original(self, x, z)
    if z is None or self.group_size is not None or not self.norm_before_gate:
        raise NotImplementedError("the gated RMS norm on a CPU needs a gate, one group, and the norm before the gate")
    return rms_norm_gated(x, self.weight, z, self.eps, self.activation)


def _shared_expert(
    original: Callable[..., None],
    hidden_states: Any,
    gate_weight: Any,
    shared_output: Any,
    output: Any,
    *,
    do_add: bool,
) -> None:
    if hidden_states.device.type != "cpu":
        original(hidden_states, gate_weight, shared_output, output, do_add=do_add)
        return
    scale_by_sigmoid_gate(hidden_states, gate_weight, shared_output, output, add=do_add)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "gated-norm",
        "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
        HookType.AROUND,
        _norm,
        "gated delta net models fail on a CPU",
        ("self", "x", "z"),
    ),
    Hook(
        "shared-expert-gate",
        "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        HookType.AROUND,
        _shared_expert,
        "models with a gated shared expert fail on a CPU",
        ("hidden_states", "gate_weight", "shared_output", "output", "do_add"),
    ),
)
