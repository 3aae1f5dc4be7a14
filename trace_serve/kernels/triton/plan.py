"""How work is cut into programs: numbers that were chosen for the memory system, in one place.

A lane holds whole blocks of 16 values (32 bytes of BF16, two 16-byte loads), so consecutive lanes read consecutive
memory and a block needs no exchange between lanes. The lanes of a row are a part of one warp wherever the row is short
enough, so that its maximum needs no shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

WARP = 32
MAX_CHUNKS = 8
"""Blocks a lane holds at most: 8 registers each."""
MAX_UNPACKED_CHUNKS = 4
MAX_WARPS_A_ROW = 8
MAX_ROW_BLOCKS = WARP * MAX_CHUNKS * MAX_WARPS_A_ROW
"""The longest row (K = 32768) whose maximum is found in registers."""
FLAT_BLOCKS = 128
"""With a static scale rows do not matter, and contiguous input is cut into pieces of this many blocks."""
_MANY_PROGRAMS = 16384
MAX_STEPS = 4
_INTERPRETED_BLOCKS = 8192


@dataclass(frozen=True)
class RowPlan:
    """`steps` times `rows` rows a program, each row in `chunks` passes of `lanes` lanes."""

    rows: int
    lanes: int
    chunks: int
    num_warps: int
    steps: int


def plan_rows(k_blocks: int, rows: int, *, rotation: int = 0, unpacked: bool = False) -> RowPlan:
    """The plan for `rows` rows of `k_blocks` blocks, at most MAX_ROW_BLOCKS.

    `unpacked` says that values are held as fp32 or are costly to make, so that a lane should hold fewer of them.

    Of the widths that keep a row within one warp, the one that leaves the fewest lanes idle: K = 576 takes 8 lanes five
    times over 4 rows rather than 32 lanes twice. Four lanes read one 128-byte line.
    """
    most = MAX_UNPACKED_CHUNKS if unpacked else MAX_CHUNKS
    if k_blocks > WARP * most:
        num_warps = triton.next_power_of_2(-(-k_blocks // (WARP * most)))
        lanes = WARP * num_warps
        return RowPlan(1, lanes, -(-k_blocks // lanes), num_warps, 1)
    widths = [w for w in (1, 2, 4, 8, 16, 32) if w * 16 >= rotation and (w >= 4 or w >= k_blocks)]
    fitting = [w for w in widths if -(-k_blocks // w) <= most]
    lanes = min(fitting, key=lambda w: (-(-k_blocks // w) * w, -w))
    # One warp a program needs no barrier and spreads a small batch over the card; many rows take several steps, so that
    # starting programs does not become the limit.
    programs = -(-rows * lanes // WARP)
    steps = min(MAX_STEPS, max(1, programs // _MANY_PROGRAMS))
    return RowPlan(WARP // lanes, lanes, -(-k_blocks // lanes), 1, steps)


def plan_rows_interpreted(k_blocks: int) -> RowPlan:
    """Few large programs: the interpreter's cost is one of operations, not of elements."""
    lanes = triton.next_power_of_2(max(k_blocks, 1))
    return RowPlan(max(1, _INTERPRETED_BLOCKS // lanes), lanes, 1, 1, 1)
