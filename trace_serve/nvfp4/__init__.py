"""NVFP4 numerics in plain torch: the reference for every kernel.

Fast backends live in `trace_serve.kernels`; guided rounding lives in `trace_serve.guided`.
"""

from trace_serve.nvfp4.global_scale import (
    activation_global_scale,
    finite_amax,
    kv_global_scale,
    pow2_exponent,
    pow2_from_exponent,
    pow2_global_scale,
    weight_global_scale,
)
from trace_serve.nvfp4.packing import hint_bits, pack, unpack, unpack_values
from trace_serve.nvfp4.quantize import (
    INCIDENT_NAMES,
    Quantized,
    check_blocks,
    count_incidents,
    dequantize,
    fake_quantize,
    new_counters,
    quantize,
    quantize_tokens,
)
from trace_serve.nvfp4.rotation import hadamard, rotate

__all__ = [
    "INCIDENT_NAMES",
    "Quantized",
    "activation_global_scale",
    "check_blocks",
    "count_incidents",
    "dequantize",
    "fake_quantize",
    "finite_amax",
    "hadamard",
    "hint_bits",
    "kv_global_scale",
    "new_counters",
    "pack",
    "pow2_exponent",
    "pow2_from_exponent",
    "pow2_global_scale",
    "quantize",
    "quantize_tokens",
    "rotate",
    "unpack",
    "unpack_values",
    "weight_global_scale",
]
