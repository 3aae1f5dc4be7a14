"""Bytes that a loaded model takes here, and would take in the packed layout that a card holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trace_serve.recipe import BLOCK


def packed_bytes(shape: tuple[int, ...], global_scales: int) -> int:
    """Bytes of NVFP4 weights: half a byte a value, one E4M3 byte a block of 16, four bytes a global scale.

    Args:
        shape: of the weight; its last dimension is the reduction.
        global_scales: FP32 scales kept with it.
    """
    values = math.prod(shape)
    return values // 2 + values // BLOCK + 4 * global_scales


def of_engine(model: Any, quantized: Mapping[int, Any], pool_bytes: int, hint_bytes: int) -> dict[str, int]:
    """Memory of one rank.

    Args:
        model: the loaded model.
        quantized: layers with experts in NVFP4, by index: `w13_weight` [E, 2I, H] and `w2_weight` [E, H, I].
        pool_bytes: of the KV pool's buffers.
        hint_bytes: of the host memory that keeps experts' outcomes for hints.

    Returns:
        `weights_bytes` as held here, `experts_bytes_bf16` and `experts_bytes_packed` of the quantized experts (here
        they are held as their BF16 images), `weights_bytes_packed` with those packed, `kv_bytes`, `hints_bytes`, and
        `total_bytes_packed` of weights and KV on a card.
    """
    weights = sum({id(p): p.nbytes for p in model.parameters()}.values())
    experts = packed = 0
    for layer in quantized.values():
        for name, scales in (("w13_weight", 2), ("w2_weight", 1)):
            weight = getattr(layer, name)
            experts += weight.nbytes
            packed += packed_bytes(tuple(weight.shape), scales * weight.shape[0])
    return {
        "weights_bytes": weights,
        "experts_bytes_bf16": experts,
        "experts_bytes_packed": packed,
        "weights_bytes_packed": weights - experts + packed,
        "kv_bytes": pool_bytes,
        "hints_bytes": hint_bytes,
        "total_bytes_packed": weights - experts + packed + pool_bytes,
    }
