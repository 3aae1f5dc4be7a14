"""Attention of an FP4 engine on the CPU: one call a layer for the whole batch, reading the packed pool directly.

SGLang's `torch_native` backend loops over sequences and gathers, dequantizes and multiplies each on its own. Here the
loop is compiled (`attention_loops`), and a row's bits depend on that row's sequence alone: the same tokens give the
same output alone or in a batch, prefilled at once or in chunks, cold or behind a cached prefix.

Scores, softmax and weighted sum are fp32; queries, keys, values and the result are BF16, as in PyTorch's
`scaled_dot_product_attention`, which also rounds the softmax weights to BF16. The two differ by BF16 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trace_serve.engine import attention_loops
from trace_serve.engine.gathered import GatheredKV
from trace_serve.errors import EngineError, ShapeError
from trace_serve.recipe import BLOCK

_NO_SCALES = np.zeros((1, 1), dtype=np.uint8)

Pool = Tensor | GatheredKV
"""One side of a layer's KV pool: packed NVFP4 behind `GatheredKV`, or bfloat16 [slots, kv_heads, D]."""


@dataclass(frozen=True)
class Batch:
    """Which tokens of the pool each sequence sees.

    Attributes:
        starts: int64 [B + 1], first query of each sequence; a sequence's queries are its last tokens.
        lengths: int64 [B], tokens of each sequence, its queries included.
        rows: int64 [B], row of each sequence in `table`.
        table: int32 [rows, context], slots of each sequence's tokens.
    """

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]

    @classmethod
    def of(cls, table: Tensor, rows: Tensor, lengths: Tensor, queries: Tensor | None = None) -> Batch:
        """From SGLang's tensors; `queries` [B] counts each sequence's queries, and None means one each (decode)."""
        seen = lengths.to(torch.int64).numpy()
        starts = np.zeros(seen.size + 1, dtype=np.int64)
        np.cumsum(np.ones_like(seen) if queries is None else queries.to(torch.int64).numpy(), out=starts[1:])
        return cls(starts, seen, rows.to(torch.int64).numpy(), table.to(torch.int32).contiguous().numpy())


def attend(query: Tensor, keys: Pool, values: Pool, batch: Batch, scaling: float, out: Tensor) -> None:
    """Causal attention of all sequences of a batch, grouped heads included.

    Args:
        query: bfloat16 [N, heads, D], D a multiple of 16; rows past the last sequence are padding.
        keys, values: a layer's pool, both of one kind.
        batch: which slots belong to which query.
        scaling: factor of the scores, usually D ** -0.5.
        out: bfloat16 [N, heads, D], contiguous, filled in; padding rows become zero.

    Raises:
        ShapeError: shapes or dtypes that do not fit each other.
        EngineError: a sequence names slots outside the pool, or has fewer tokens than queries.
    """
    _check(query, keys, values, batch, out)
    count = int(batch.starts[-1])
    bad = attention_loops.attend(
        query.contiguous().flatten(1).view(torch.uint16).numpy(),
        batch.starts,
        batch.lengths,
        batch.rows,
        batch.table,
        *_arrays(keys),
        *_arrays(values),
        keys.shape[1],
        np.float32(scaling),
        out.flatten(1).view(torch.uint16).numpy(),
    )
    if bad >= 0:
        raise EngineError(
            f"attention: sequence {bad} of {batch.lengths.size} has {batch.lengths[bad]} tokens for "
            f"{batch.starts[bad + 1] - batch.starts[bad]} queries, or a slot outside the pool of {keys.shape[0]}; "
            "the request table does not fit the KV pool"
        )
    out[count:] = 0


def _arrays(side: Pool) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8], np.float32]:
    if isinstance(side, GatheredKV):
        return side.codes.flatten(1).numpy(), side.scales.flatten(1).numpy(), np.float32(side.global_scale)
    return side.view(torch.uint16).flatten(1).numpy(), _NO_SCALES, np.float32(1.0)


def _check(query: Tensor, keys: Pool, values: Pool, batch: Batch, out: Tensor) -> None:
    if type(keys) is not type(values) or keys.shape != values.shape or len(keys.shape) != 3:
        raise ShapeError(
            f"values: got {type(values).__name__} {tuple(values.shape)}, expected {type(keys).__name__} "
            f"{tuple(keys.shape)} like the keys, [slots, kv_heads, D]",
            field="values",
        )
    kv_heads, dim = keys.shape[1], keys.shape[2]
    if query.dim() != 3 or query.shape[2] != dim or query.shape[1] % kv_heads or dim % BLOCK:
        raise ShapeError(
            f"query: got shape {tuple(query.shape)}, expected [N, heads, {dim}] with heads a multiple of {kv_heads} "
            f"and D a multiple of {BLOCK}",
            field="query",
        )
    if any(t.dtype != torch.bfloat16 for t in (query, keys, values, out)):
        raise ShapeError(f"query: got {query.dtype} over a pool of {keys.dtype}, expected bfloat16", field="query")
    if out.shape != query.shape or not out.is_contiguous() or int(batch.starts[-1]) > query.shape[0]:
        raise ShapeError(
            f"out: got shape {tuple(out.shape)} for {int(batch.starts[-1])} queries, expected contiguous "
            f"{tuple(query.shape)}",
            field="out",
        )
