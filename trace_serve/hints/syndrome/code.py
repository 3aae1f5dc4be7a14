"""The parity-check code: quasi-cyclic LDPC of 2,048 bits, three checks a bit, whose syndrome can be read in steps.

A block of 2,048 bits is 32 columns of 64: bit i is bit i mod 64 of column i div 64. There are 16 rows of 64 checks.
Check z of a row is the parity of bit (z + shift) mod 64 of each column that the row has an entry in (`ENTRIES`), so a
row's 64 parities are the exclusive or of its columns, each rotated right by its shift.

The syndrome is not sent row by row but from coarse to fine, so that its first k words, 4 to 16, are the syndrome of a
code with k rows of checks:

- words 0 to 3: word r is the exclusive or of rows r, r + 4, r + 8 and r + 12;
- words 4 to 7: word 4 + r is that of rows r and r + 8, which tells that of rows r + 4 and r + 12 too;
- words 8 to 15: word 8 + r is row r, which tells row r + 8 too.

None of these codes has a cycle of length 4: two bits share at most one check. Shifts were searched with a seeded
generator for that and for few cycles of length 6; of six such tables one that failed rarely on measured differences was
kept.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

BITS = 2048
LANES = 64
COLUMNS = BITS // LANES
MIN_WORDS, MAX_WORDS = 4, 16

ENTRIES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((13, 9), (2, 43), (3, 1)),
    ((12, 24), (6, 13), (7, 7)),
    ((12, 6), (5, 34), (11, 29)),
    ((0, 13), (9, 17), (10, 34)),
    ((5, 31), (10, 26), (15, 7)),
    ((0, 54), (10, 4), (7, 7)),
    ((8, 32), (9, 16), (7, 20)),
    ((12, 62), (13, 3), (6, 39)),
    ((1, 51), (6, 19), (11, 60)),
    ((0, 28), (2, 11), (11, 40)),
    ((12, 31), (13, 29), (3, 56)),
    ((4, 54), (1, 35), (14, 0)),
    ((5, 38), (14, 15), (3, 34)),
    ((0, 23), (2, 15), (3, 5)),
    ((4, 42), (1, 10), (3, 26)),
    ((0, 50), (9, 21), (10, 41)),
    ((9, 48), (14, 52), (3, 18)),
    ((4, 26), (6, 52), (7, 4)),
    ((8, 3), (1, 62), (15, 6)),
    ((8, 36), (13, 39), (2, 22)),
    ((13, 10), (2, 13), (7, 31)),
    ((12, 34), (6, 53), (11, 63)),
    ((8, 28), (5, 5), (15, 34)),
    ((0, 58), (5, 28), (10, 53)),
    ((1, 25), (14, 6), (15, 55)),
    ((4, 30), (6, 63), (15, 49)),
    ((4, 51), (5, 50), (7, 9)),
    ((12, 52), (1, 59), (10, 60)),
    ((9, 58), (14, 60), (11, 31)),
    ((8, 20), (2, 5), (15, 29)),
    ((8, 30), (9, 27), (11, 20)),
    ((4, 52), (13, 53), (14, 22)),
)
"""Row and shift of each of a column's three entries."""


@dataclass(frozen=True)
class Checks:
    """The checks that k words of a syndrome decide, as lists of edges, row by row.

    Attributes:
        starts: int64 [k + 1]; row i has edges `starts[i]` to `starts[i + 1] - 1`.
        columns, shifts: int64 [E].
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    shifts: NDArray[np.int64]


def _merged(words: int) -> list[tuple[int, ...]]:
    """Which rows of the whole code each row of the coarser one is the sum of; what was split last comes first."""
    split: list[tuple[int, ...]]
    if words <= 8:
        split = [part for r in range(words - 4) for part in ((r, r + 8), (r + 4, r + 12))]
        return [*split, *((r, r + 4, r + 8, r + 12) for r in range(words - 4, 4))]
    split = [part for r in range(words - 8) for part in ((r,), (r + 8,))]
    return [*split, *((r, r + 8) for r in range(words - 8, 8))]


@cache
def checks(words: int) -> Checks:
    """The code of the first `words` words, 4 to 16."""
    edges = [
        [(column, shift) for column, entries in enumerate(ENTRIES) for row, shift in entries if row in rows]
        for rows in _merged(words)
    ]
    flat = np.array([edge for row in edges for edge in row], dtype=np.int64)
    starts = np.cumsum([0, *map(len, edges)], dtype=np.int64)
    return Checks(starts, np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1]))


def parities(blocks: Words, words: int) -> Words:
    """Parities of the code of `words` words, in the order of `checks(words)`.

    Args:
        blocks: uint64 [N, 32], columns.

    Returns:
        uint64 [N, words].
    """
    used = checks(words)
    out = np.zeros((blocks.shape[0], words), dtype=np.uint64)
    for row in range(words):
        for edge in range(used.starts[row], used.starts[row + 1]):
            out[:, row] ^= _rotated(blocks[:, used.columns[edge]], int(used.shifts[edge]))
    return out


def syndromes(blocks: Words) -> Words:
    """All 16 words of each block [N, 32], from coarse to fine: uint64 [N, 16]."""
    rows = parities(blocks, MAX_WORDS)[:, [2 * r for r in range(8)] + [2 * r + 1 for r in range(8)]]
    pairs = rows[:, :8] ^ rows[:, 8:]
    return np.concatenate([pairs[:, :4] ^ pairs[:, 4:], pairs[:, :4], rows[:, :8]], axis=1)


def unfolded(syndrome: Words) -> Words:
    """The first k words of syndromes [N, k] as parities in the order of `checks(k)`."""
    words = syndrome.shape[1]
    known = [syndrome[:, i] for i in range(words)]
    if words <= 8:
        split, whole = known[4:], known[:4]
    else:
        pairs = known[4:8] + [known[r] ^ known[4 + r] for r in range(4)]
        split, whole = known[8:], pairs
    halves = [half for r, word in enumerate(split) for half in (word, whole[r] ^ word)]
    return np.stack(halves + whole[len(split) :], axis=1)


def to_blocks(bits: NDArray[np.uint16], present: NDArray[np.bool_]) -> Words:
    """Hint bits of one site and layer, cut into blocks row after row.

    Args:
        bits: uint16 [T, B].
        present: bool [T]; rows that are missing count as zeros.

    Returns:
        uint64 [ceil(16 T B / 2048), 32]; what is left of the last block is zeros.
    """
    flat = np.where(present[:, None], bits, 0).astype("<u2").reshape(-1)
    padded = np.zeros(count(flat.size) * BITS // 16, dtype="<u2")
    padded[: flat.size] = flat
    return padded.view("<u8").reshape(-1, COLUMNS)


def from_blocks(blocks: Words, rows: int, width: int) -> NDArray[np.uint16]:
    """The bits uint16 [rows, width] that `to_blocks` cut."""
    flat = np.ascontiguousarray(blocks, dtype="<u8").view("<u2").reshape(-1)
    return flat[: rows * width].reshape(rows, width)


def count(words: int) -> int:
    """Blocks that so many hint words of 16 bits take."""
    return -(-words * 16 // BITS)


def digest(block: Words) -> int:
    """CRC-32 (that of zlib and Ethernet) of a block's 256 bytes, columns in little-endian order."""
    return zlib.crc32(np.ascontiguousarray(block, dtype="<u8").tobytes())


def _rotated(words: Words, shift: int) -> Words:
    return words if shift == 0 else (words >> np.uint64(shift)) | (words << np.uint64(LANES - shift))
