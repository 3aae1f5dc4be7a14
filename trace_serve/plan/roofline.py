"""What fits into a device's memory, and how fast it is decoded when memory traffic is the only limit."""

from __future__ import annotations

from trace_serve.plan.workload import Workload
from trace_serve.policy.dims import ModelDims

BF16_BITS = 16.0
NVFP4_BITS = 4.5
"""Four bits a value and one E4M3 byte for 16 values."""


def weight_bytes(model: ModelDims, expert_bits: float) -> float:
    """Bytes of all weights when routed experts take `expert_bits` a value and the rest is BF16."""
    return model.expert_parameters * expert_bits / 8 + model.other_parameters * BF16_BITS / 8


def filled_batch(model: ModelDims, load: Workload, bits: float, *, state: bool) -> float:
    """Sequences that fit beside the weights, experts and KV cache at `bits` a value; 0 where weights do not fit."""
    return max(load.usable_bytes - weight_bytes(model, bits), 0.0) / (
        kv_sequence_bytes(model, load, bits) + (state_bytes(model) if state else 0)
    )


def filled_tokens_per_second(model: ModelDims, load: Workload, bits: float, *, state: bool) -> float:
    """Decode rate of a full memory when memory traffic is the only limit.

    A step reads every weight (a large batch touches every expert) and every sequence's KV cache once, and reads and
    writes its state; compute, communication and activations are free.
    """
    batch = filled_batch(model, load, bits, state=state)
    traffic = kv_sequence_bytes(model, load, bits) + (2 * state_bytes(model) if state else 0)
    return batch / ((weight_bytes(model, bits) + batch * traffic) / (load.bandwidth_gb_s * 1e9))


def kv_sequence_bytes(model: ModelDims, load: Workload, bits: float) -> float:
    return len(model.attention_layers) * model.kv_values * load.context * bits / 8


def state_bytes(model: ModelDims) -> int:
    """FP32 state of linear attention a sequence."""
    return model.state_values * 4


def kv_capacity_tokens(model: ModelDims, load: Workload, expert_bits: float, kv_bits: float) -> float:
    """Tokens of KV cache that fit beside the weights; 0 where weights do not fit."""
    token = len(model.attention_layers) * model.kv_values * kv_bits / 8
    return max(load.usable_bytes - weight_bytes(model, expert_bits), 0.0) / token
