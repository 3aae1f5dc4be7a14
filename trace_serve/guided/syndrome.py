"""Decodes a rollout's lowest bits from syndromes and the trainer's own values.

The trainer's nearest code nearly always has the rollout's lowest bit, and where it has not, its value lies near a
rounding boundary. So the distance to the nearest boundary is the reliability of a bit, and the decoder looks for the
few differences that explain the syndrome (Slepian and Wolf, 1973; Liveris et al., 2002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.errors import ConfigError
from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.quantize import normalized
from trace_serve.hints.rows import HintFile
from trace_serve.hints.syndrome import code
from trace_serve.hints.syndrome.packed import CodedSite, PackedHints, require_intact
from trace_serve.nvfp4 import e2m1
from trace_serve.recipe import Recipe

STEPS = (6, 8, 12, 16)
"""How many words of a syndrome are tried before the block is fetched whole."""
_FARTHEST = 0.25
_CERTAIN = 1e3


def own_bits(u: Tensor) -> tuple[Tensor, Tensor]:
    """What the trainer knows about the rollout's lowest bits.

    Args:
        u: fp32 values under the rollout's scales, any shape.

    Returns:
        uint8 lowest bits of the nearest codes, and fp32 reliabilities: distances to the nearest boundary between codes,
        in units of the grid, at most 0.25, from where on nearly nothing differs.
    """
    grid = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float32, device=u.device)
    boundaries = (grid[1:] + grid[:-1]) / 2
    size = u.abs()
    above = torch.bucketize(size, boundaries).clamp(max=boundaries.numel() - 1)
    below = (above - 1).clamp(min=0)
    distance = torch.minimum((size - boundaries[above]).abs(), (size - boundaries[below]).abs())
    return e2m1.encode(u) & 1, distance.clamp(max=_FARTHEST)


class SyndromeDecoder:
    """Decodes the sites of one packed hint file, layer by layer.

    Args:
        hints: its counters in `decoding` are updated.

    Raises:
        ConfigError: numba is not installed.
    """

    def __init__(self, hints: PackedHints) -> None:
        _compiled()
        self.hints = hints

    def decode(
        self,
        site: str,
        layer: int,
        rows: NDArray[np.int64],
        own: NDArray[np.uint8],
        reliability: NDArray[np.float32],
    ) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
        """The rollout's bits of some rows of a layer. Blocks run over rows, so give all rows of a sequence at once.

        Args:
            site: one that is coded.
            layer: of the model.
            rows: int64 [R], distinct rows of the file.
            own: uint8 [R, K], the trainer's own bits.
            reliability: fp32 [R, K], not negative.

        Returns:
            uint16 [R, K/16] bits, and bool [R]: rows whose bits are all the rollout's. Blocks that neither the syndrome
            nor the second file gives keep the trainer's own.

        Raises:
            HintFormatError: the second file is damaged or of another rollout.
        """
        coded = self.hints.coded[site]
        index = self.hints.site(site).layers.index(layer)
        total, size = coded.present.size, own.shape[1]
        mine = np.zeros((total, size), dtype=np.uint8)
        trust = np.zeros((total, size), dtype=np.float32)
        mine[rows], trust[rows] = own, reliability
        mine[~coded.present], trust[~coded.present] = 0, _CERTAIN
        words = np.packbits(mine, axis=1, bitorder="little").view("<u2")
        blocks = code.to_blocks(words, np.ones(total, dtype=np.bool_))
        padding = np.full(blocks.size * code.LANES - trust.size, _CERTAIN, dtype=np.float32)
        spread = np.concatenate([trust.reshape(-1), padding]).reshape(-1, code.COLUMNS, code.LANES)
        wanted = np.unique(_block_range(rows[coded.present[rows]], size))
        known = np.ones(blocks.shape[0], dtype=np.bool_)
        blocks[wanted], known[wanted] = self._blocks(site, coded, index, wanted, blocks[wanted], spread[wanted])
        found = code.from_blocks(blocks, total, coded.width)[rows]
        return found, np.asarray(known[_block_range(rows, size)].all(axis=1))

    def _blocks(
        self, site: str, coded: CodedSite, layer: int, wanted: NDArray[np.int64], own: code.Words, trust: NDArray[Any]
    ) -> tuple[code.Words, NDArray[np.bool_]]:
        """Decoded blocks [N, 32] where bool [N], and the trainer's own elsewhere."""
        counters, more = self.hints.decoding, self.hints.more
        check, count = coded.check[layer, wanted], coded.syndrome.shape[2]
        syndrome = np.zeros((len(wanted), code.MAX_WORDS), dtype=np.uint64)
        syndrome[:, :count] = coded.syndrome[layer, wanted]
        out, done = own.copy(), np.zeros(len(wanted), dtype=np.bool_)
        counters.blocks += len(wanted)
        have = count
        for words in (count, *(step for step in STEPS if step > count)):
            left = np.flatnonzero(~done)
            if not left.size or (words > count and more is None):
                break
            if more is not None and words > count:
                syndrome[left, have:words] = more.words(site, layer, wanted[left].tolist(), have - count, words - count)
                counters.fetched_bytes += 8 * (words - have) * left.size
                have = words
            differences, converged = _differences(syndrome[left, :words], own[left], trust[left])
            for at, block in zip(left[converged], own[left[converged]] ^ differences[converged], strict=True):
                if code.digest(block) == check[at]:
                    out[at], done[at] = block, True
                    counters.more += words > count
                else:
                    counters.false += 1
        left = np.flatnonzero(~done)
        if more is None or not left.size:
            counters.failed += left.size
            return out, done
        out[left] = more.raw(site, layer, wanted[left].tolist())
        require_intact(site, out[left], check[left])
        counters.raw += left.size
        counters.fetched_bytes += code.BITS // 8 * left.size
        return out, np.ones_like(done)


def _differences(
    syndrome: code.Words, own: code.Words, trust: NDArray[np.float32]
) -> tuple[code.Words, NDArray[np.bool_]]:
    """Likeliest differences [N, 32] to the blocks of syndromes [N, k], and where there are any; `trust` is lost."""
    used = code.checks(syndrome.shape[1])
    parities = np.ascontiguousarray(code.unfolded(syndrome) ^ code.parities(own, syndrome.shape[1]))
    found, iterations = np.zeros_like(own), np.zeros(len(own), dtype=np.int64)
    arguments = (used.starts, used.columns, used.shifts, parities, np.ascontiguousarray(trust), found, iterations)
    decode = _compiled().find_differences
    cuts = np.linspace(0, len(own), min(torch.get_num_threads(), len(own)) + 1).astype(int)
    with ThreadPoolExecutor(len(cuts) - 1) as pool:
        list(pool.map(lambda span: decode(*arguments, *span), pairwise(cuts)))
    return found, iterations > 0


def _block_range(rows: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Blocks that rows of `size` values lie in: int64 [R, m], the last of a row repeated where it has fewer."""
    first, last = rows * size // code.BITS, ((rows + 1) * size - 1) // code.BITS
    return np.minimum(first[:, None] + np.arange((size - 1) // code.BITS + 2), last[:, None])


@cache
def _compiled() -> Any:
    try:
        from trace_serve.guided import min_sum
    except ImportError as exc:
        raise ConfigError(
            "numba: not installed, expected it for packed hints; run `pip install 'trace-serve[syndrome]'`",
            field="numba",
        ) from exc
    return min_sum


class PackedBits:
    """Bits of a batch's packed files, decoded as the layers are computed and kept for a recomputation.

    Args:
        hints: a file a sequence of the batch; those that are not packed are left alone.
        recipe: of the rollouts.
    """

    def __init__(self, hints: Sequence[HintFile | None], recipe: Recipe) -> None:
        self._decoders = {i: SyndromeDecoder(each) for i, each in enumerate(hints) if isinstance(each, PackedHints)}
        self._recipe = recipe
        self._kept: dict[tuple[int, str, int], tuple[NDArray[np.uint16], NDArray[np.bool_]]] = {}

    def fill(
        self, site: str, layer: int, x: Tensor, outcomes: Outcomes, rows: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        """Writes decoded bits into the outcomes, and marks their rows present.

        Args:
            site, layer: of the operand.
            x: the operand [N, K].
            outcomes: of the same rows, with scales.
            rows: for each sequence of the batch its rows among the N, and where they are in its file.
        """
        assert outcomes.present is not None
        for index, decoder in self._decoders.items():
            hints = decoder.hints
            coded = hints.coded.get(site)
            if coded is None or layer not in hints.site(site).layers:
                continue
            mine, at = rows[index]
            present = torch.from_numpy(coded.present).to(at.device)[at]
            mine, at = mine[present], at[present]
            where = at.cpu().numpy()
            kept, known = self._kept.setdefault(
                (index, site, layer), (np.zeros((coded.present.size, coded.width), np.uint16), ~coded.present)
            )
            if not known[where].all():
                own, reliability = own_bits(self._normalized(site, layer, x[mine].detach(), outcomes, mine))
                kept[where], known[where] = decoder.decode(
                    site, layer, where, own.cpu().numpy(), reliability.cpu().numpy()
                )
            outcomes.bits[mine] = torch.from_numpy(kept[where].astype(np.int32)).to(outcomes.bits.device)
            outcomes.present[mine] = True

    def _normalized(self, site: str, layer: int, x: Tensor, outcomes: Outcomes, mine: Tensor) -> Tensor:
        scale = outcomes.global_scale
        theirs = replace(
            outcomes,
            bits=outcomes.bits[mine],
            scales=None if outcomes.scales is None else outcomes.scales[mine],
            global_scale=None if scale is None else scale[mine],
            present=None,
            codes=None,
        )
        if site == "experts_in":
            own = self._recipe.experts_in_scale(layer)
            return normalized(x, theirs, self._recipe, global_scale=own)
        own = self._recipe.kv_scales(layer)[0 if site == "k" else 1]
        return normalized(x, theirs, self._recipe, operand="kv", global_scale=own)
