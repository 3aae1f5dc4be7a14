"""Device functions for tiles that feed a matrix product: packed codes to values, and the product itself."""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit
from trace_serve.kernels.triton.formats import e2m1_value, e4m3_value


@jit
def unpack_tile(codes: tl.tensor, scales: tl.tensor) -> tl.tuple:
    """Codes uint8 [r, c] and scale bytes uint8 [r, c/8] to the even and the odd values, fp32 [r, c] each.

    Values are code * block scale, at most six significant bits. They stay split into even and odd: a sum over the
    reduction dimension does not care for its order, and interleaving would cost a pass through shared memory.
    """
    r: tl.constexpr = codes.shape[0]
    c: tl.constexpr = codes.shape[1]
    scale = tl.expand_dims(e4m3_value(scales.to(tl.uint32)), 2)
    scale = tl.reshape(tl.broadcast_to(scale, [r, c // 8, 8]), [r, c])
    word = codes.to(tl.uint32)
    return e2m1_value(word & 0xF) * scale, e2m1_value(word >> 4) * scale


@jit
def split_pairs(pairs: tl.tensor) -> tl.tuple:
    """BF16 pairs in an int32 tensor to the even and the odd values, fp32."""
    word = pairs.to(tl.uint32, bitcast=True)
    return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@jit
def product(a: tl.tensor, b: tl.tensor, acc: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """acc + a @ b with fp32 sums; BF16 tensor cores where there are some. The interpreter's BF16 product is wrong."""
    if level >= 90:
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
