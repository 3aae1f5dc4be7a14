"""NVFP4 numerics in plain torch: the reference for every kernel.

Fast backends live in `trace_serve.kernels`; guided rounding lives in `trace_serve.guided`.
"""

from trace_serve.nvfp4.block_scale import OPERANDS, PORTABLE_RULES, Operand, Rules, rules
from trace_serve.nvfp4.fake import fake_quantize, fake_quantize_tokens, fake_quantize_weight, straight_through
from trace_serve.nvfp4.global_scale import (
    GlobalScale,
    activation_global_scale,
    finite_amax,
    matrix_global_scale,
    pow2_exponent,
    pow2_from_exponent,
    pow2_global_scale,
    row_global_scale,
    token_global_scale,
    weight_global_scale,
)
from trace_serve.nvfp4.layouts import deinterleave_v, interleave_v, swizzle, swizzled_size, unswizzle
from trace_serve.nvfp4.packing import hint_bits, pack, unpack, unpack_values
from trace_serve.nvfp4.quantize import (
    INCIDENT_NAMES,
    Quantized,
    check_blocks,
    count_incidents,
    dequantize,
    new_counters,
    quantize,
    quantize_tokens,
    quantize_under,
    quantize_weight,
)
from trace_serve.nvfp4.rotation import hadamard, rotate

__all__ = [
    "INCIDENT_NAMES",
    "OPERANDS",
    "PORTABLE_RULES",
    "GlobalScale",
    "Operand",
    "Quantized",
    "Rules",
    "activation_global_scale",
    "check_blocks",
    "count_incidents",
    "deinterleave_v",
    "dequantize",
    "fake_quantize",
    "fake_quantize_tokens",
    "fake_quantize_weight",
    "finite_amax",
    "hadamard",
    "hint_bits",
    "interleave_v",
    "matrix_global_scale",
    "new_counters",
    "pack",
    "pow2_exponent",
    "pow2_from_exponent",
    "pow2_global_scale",
    "quantize",
    "quantize_tokens",
    "quantize_under",
    "quantize_weight",
    "rotate",
    "row_global_scale",
    "rules",
    "straight_through",
    "swizzle",
    "swizzled_size",
    "token_global_scale",
    "unpack",
    "unpack_values",
    "unswizzle",
    "weight_global_scale",
]
