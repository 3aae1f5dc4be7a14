"""Bookkeeping of KV slots."""

from __future__ import annotations

from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes each request's new KV slots into its row of the request-to-token table.

    Args:
        req_pool_indices: int [B], row of each request.
        req_to_token: int32 [rows, pool_len], changed in place.
        start_offset: int [B], first column to write.
        end_offset: int [B], one past the last column.
        out_cache_loc: int [sum(end - start)], slots of all requests, one after the other.
        pool_len: columns of `req_to_token`.

    Raises:
        ValueError: an end offset lies past the table.
    """
    position = 0
    slots = out_cache_loc.to(req_to_token.dtype)
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        if end > pool_len:
            raise ValueError(f"assign_req_to_token_pool_cpu: end offset {end} is past the table's {pool_len} columns")
        req_to_token[row, start:end] = slots[position : position + end - start]
        position += end - start
