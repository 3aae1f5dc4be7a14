"""Where block-scale bytes lie in memory: linear, the tiled layouts of the GEMMs, and the 4-token layout of V.

A tiled layout pads rows to `TILE_ROWS` and scale columns to 4; what is in the padding is up to the writer, and nothing
read back through here depends on it. 128x4 is the layout of the block-scaled tensor-core instructions (PTX ISA,
"Scale factor B layout"; cuBLAS "1D block scaling factors layout"): within a tile of 512 bytes the byte of row r, column
c is at (r % 32) * 16 + (r // 32) * 4 + c. 8x4 keeps a tile's rows in order: r * 4 + c.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor

from trace_serve.errors import ShapeError

Layout = Literal["linear", "128x4", "8x4"]
TILE_ROWS: dict[str, int] = {"linear": 1, "128x4": 128, "8x4": 8}
TILE_COLUMNS = 4
V_TOKENS = 4
"""Tokens whose V scales are interleaved."""


def swizzled_size(rows: int, columns: int, layout: Layout) -> int:
    """Bytes that [rows, columns] scales take in a layout, padding included."""
    if _tile_rows(layout) == 1:
        return rows * columns
    return _up(rows, TILE_ROWS[layout]) * _up(columns, TILE_COLUMNS)


def swizzle(scales: Tensor, layout: Layout, *, fill: int = 0) -> Tensor:
    """Writes scales in a layout.

    Args:
        scales: uint8 [..., rows, columns], columns = K/16; leading dimensions are separate matrices.
        layout: `linear`, `128x4` or `8x4`.
        fill: byte of the padding.

    Returns:
        uint8 [..., swizzled_size].

    Raises:
        ShapeError: not uint8, fewer than two dimensions, or an unknown layout.
    """
    tile = _tile_rows(layout)
    if scales.dtype != torch.uint8 or scales.dim() < 2:
        raise ShapeError(
            f"scales: got {scales.dtype} {tuple(scales.shape)}, expected uint8 [..., rows, K/16]", field="scales"
        )
    *lead, rows, columns = scales.shape
    if tile == 1:
        return scales.reshape(*lead, rows * columns)
    padded = scales.new_full((*lead, _up(rows, tile), _up(columns, TILE_COLUMNS)), fill)
    padded[..., :rows, :columns] = scales
    inner = (4, 32) if layout == "128x4" else (1, tile)
    tiles = padded.reshape(prod(lead), padded.shape[-2] // tile, *inner, padded.shape[-1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(*lead, swizzled_size(rows, columns, layout))


def unswizzle(data: Tensor, rows: int, columns: int, layout: Layout) -> Tensor:
    """Reads scales from a layout: uint8 [..., swizzled_size] to [..., rows, columns]; padding is not looked at.

    Raises:
        ShapeError: not uint8, another number of bytes than `swizzled_size`, or an unknown layout.
    """
    tile = _tile_rows(layout)
    size = swizzled_size(rows, columns, layout)
    if data.dtype != torch.uint8 or data.dim() < 1 or data.shape[-1] != size:
        raise ShapeError(
            f"data: got {data.dtype} {tuple(data.shape)}, expected uint8 [..., {size}] for {rows} x {columns} scales "
            f"in layout {layout}",
            field="data",
        )
    lead = data.shape[:-1]
    if tile == 1:
        return data.reshape(*lead, rows, columns)
    inner = (32, 4) if layout == "128x4" else (tile, 1)
    row_tiles, column_tiles = _up(rows, tile) // tile, _up(columns, TILE_COLUMNS) // TILE_COLUMNS
    tiles = data.reshape(prod(lead), row_tiles, column_tiles, *inner, TILE_COLUMNS)
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*lead, row_tiles * tile, column_tiles * TILE_COLUMNS)
    return padded[..., :rows, :columns]


def interleave_v(scales: Tensor) -> Tensor:
    """V scales of a page in the order that trtllm-gen attention reads.

    Of every four tokens the bytes change places: byte c of token t goes to token (4 * c) // C, byte (4 * c) % C + t,
    where C = D/16 and t = 0..3, so that one position of four tokens is adjacent.

    Args:
        scales: uint8 [..., tokens, D/16], tokens a multiple of 4, D a multiple of 64.

    Returns:
        uint8, the same shape.

    Raises:
        ShapeError: not uint8, or other sizes.
    """
    tokens, columns = _check_v(scales)
    groups = scales.reshape(*scales.shape[:-2], tokens // V_TOKENS, V_TOKENS, columns)
    return groups.transpose(-1, -2).reshape(scales.shape)


def deinterleave_v(scales: Tensor) -> Tensor:
    """Undoes `interleave_v`; same shapes and errors."""
    tokens, columns = _check_v(scales)
    groups = scales.reshape(*scales.shape[:-2], tokens // V_TOKENS, columns, V_TOKENS)
    return groups.transpose(-1, -2).reshape(scales.shape)


def _check_v(scales: Tensor) -> tuple[int, int]:
    if scales.dtype != torch.uint8 or scales.dim() < 2 or scales.shape[-2] % V_TOKENS or scales.shape[-1] % 4:
        raise ShapeError(
            f"scales: got {scales.dtype} {tuple(scales.shape)}, expected uint8 [..., tokens, D/16] with tokens a "
            f"multiple of {V_TOKENS} and D of 64",
            field="scales",
        )
    return scales.shape[-2], scales.shape[-1]


def _tile_rows(layout: str) -> int:
    if layout not in TILE_ROWS:
        raise ShapeError(f"layout: got {layout!r}, expected one of {', '.join(TILE_ROWS)}", field="layout")
    return TILE_ROWS[layout]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
