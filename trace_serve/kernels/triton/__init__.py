"""NVFP4 kernels in Triton for sm_90a, sm_100a and sm_103a; bit-exact with `trace_serve.nvfp4`.

What they compute is defined there and in `silu`; here are the kernels, how work is cut, and the calls that launch them.
"""

from trace_serve.kernels.triton.attention import choose_splits, decode_attention
from trace_serve.kernels.triton.backend import KERNELS, TritonKernels
from trace_serve.kernels.triton.experts import ExpertTiles, expert_product, group_by_expert
from trace_serve.kernels.triton.kv import KVBuffers, gather_dequantize, store_kv
from trace_serve.kernels.triton.quantize import QuantizedRows, quantize_rows, quantize_silu_and_mul
from trace_serve.kernels.triton.silu import silu_and_mul

__all__ = [
    "KERNELS",
    "ExpertTiles",
    "KVBuffers",
    "QuantizedRows",
    "TritonKernels",
    "choose_splits",
    "decode_attention",
    "expert_product",
    "gather_dequantize",
    "group_by_expert",
    "quantize_rows",
    "quantize_silu_and_mul",
    "silu_and_mul",
    "store_kv",
]
