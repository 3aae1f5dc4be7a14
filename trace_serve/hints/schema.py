"""Constants of wire format version 1 and the sizes that follow from it."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trace_serve.recipe import BLOCK

FORMAT = "trace-hints"
SCHEMA_VERSION = 1
BIT_ORDER: Literal["little"] = "little"
POISON = 0xFF
POISON_LOG2 = -128
"""What the writer puts under a missing row, in every byte of a tensor and as an exponent."""
GLOBAL_BYTES = {"static": 0, "log2": 1, "fp32": 4}
"""Bytes of one per-token global scale by kind."""
METADATA_KEYS = frozenset(
    {
        "format",
        "schema_version",
        "recipe_id",
        "model_digest",
        "weight_versions",
        "first_token",
        "rows",
        "next_token_id",
        "sites",
        "bit_order",
        "token_ids_digest",
    }
)


SITE_KEYS = frozenset({"layers", "values", "codes", "scale", "groups", "global_scale"})


def token_ids_digest(token_ids: NDArray[np.int32]) -> str:
    """`sha256:` of the ids as little-endian int32."""
    return "sha256:" + hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()


def lsb_bytes(blocks: int) -> int:
    """Bytes that hold one bit for each of `blocks` blocks."""
    return (blocks + 7) // 8


def lowest_bits(codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """uint8 [..., 8 B], sixteen packed codes a block, to uint16 [..., B] as `<site>.bits` holds them."""
    found = np.ascontiguousarray(codes).view("<u8") & np.uint64(0x1111111111111111)
    for shift, mask in ((3, 0x0303030303030303), (6, 0x000F000F000F000F), (12, 0x000000FF000000FF), (24, 0xFFFF)):
        found = (found | found >> np.uint64(shift)) & np.uint64(mask)
    return found.astype(np.uint16)


def site_bytes_per_token(values: int, layers: int, *, scale: str = "lsb", global_bytes: int, codes: str = "lsb") -> int:
    """Bytes of one row of a site, masks excluded.

    Args:
        values: quantized values a token and layer, a multiple of 16.
        layers: number of layers.
        scale: `lsb` (one bit a block, whole bytes a row and layer), `byte` or `none`.
        global_bytes: bytes of per-token global scales a row and layer, see `GLOBAL_BYTES`; 0 where it is static.
        codes: `lsb` (one bit a value) or `full` (four).
    """
    blocks = values // BLOCK
    scales = {"lsb": lsb_bytes(blocks), "byte": blocks, "none": 0}[scale]
    return layers * ((8 if codes == "full" else 2) * blocks + scales + global_bytes)
