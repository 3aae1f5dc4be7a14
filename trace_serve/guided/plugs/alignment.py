"""Which column of a batch each row of a hint file belongs to: padded on either side, or packed into one row.

Guided rounding and routing count columns. A hint file counts positions of its own sequence, so it is moved by what lies
before the sequence; several sequences in one row become one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.hints.rows import HintFile, Site
from trace_serve.hints.syndrome.packed import PackedHints


@dataclass(frozen=True)
class Segment:
    """Columns `start` to `stop - 1` of a row of the batch: one sequence, its first token at `start`."""

    row: int
    start: int
    stop: int


def segments(
    input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> list[Segment]:
    """The sequences of a batch, row by row.

    Args:
        input_ids: int [B, T].
        attention_mask: 0 or 1 [B, T], ones in one piece a row; it wins over `position_ids`.
        position_ids: [B, T] or [n, B, T], 0 where a sequence of a packed row begins. With neither, a row is a sequence.

    Raises:
        ConfigError: the mask has another shape, or a hole.
    """
    batch, columns = input_ids.shape
    if attention_mask is not None:
        return [Segment(row, *_span(mask)) for row, mask in enumerate(_mask(attention_mask, batch, columns))]
    if position_ids is None:
        return [Segment(row, 0, columns) for row in range(batch)]
    positions = position_ids[0] if position_ids.dim() == 3 else position_ids
    found = []
    for row, each in enumerate(positions.expand(batch, columns).cpu()):
        # A row that begins in the middle of a sequence has a part of it before the first 0.
        starts = sorted({0, *torch.nonzero(each == 0).flatten().tolist()})
        found += [Segment(row, a, b) for a, b in zip(starts, [*starts[1:], columns], strict=True)]
    return found


def aligned(
    hints: Sequence[HintFile | None],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> list[HintFile | None]:
    """A file a row of the batch whose positions are columns of the batch.

    Args:
        hints: a file a sequence, in the order of `segments`; None for one without. Rows behind the end of a sequence
            that the trainer cut are not used.

    Raises:
        ConfigError: another number of files than sequences.
        HintFormatError: a file's tokens are not those of its sequence, or files of one row do not fit each other.
    """
    found = segments(input_ids, attention_mask, position_ids)
    if len(found) != len(hints):
        raise ConfigError(
            f"rollout_hints: got {len(hints)} files, expected one for each of {len(found)} sequences (None for those "
            "without)",
            field="rollout_hints",
        )
    ids = input_ids.cpu().numpy()
    rows: list[list[tuple[Segment, HintFile]]] = [[] for _ in range(input_ids.shape[0])]
    counts = [0] * len(rows)
    for index, (segment, each) in enumerate(zip(found, hints, strict=True)):
        counts[segment.row] += 1
        if each is not None:
            _check_tokens(index, each, ids[segment.row, segment.start : segment.stop])
            rows[segment.row].append((segment, each))
    return [
        None if not parts else _moved(*parts[0]) if count == 1 else _joined(parts, ids[row])
        for row, (count, parts) in enumerate(zip(counts, rows, strict=True))
    ]


def _mask(mask: Tensor, batch: int, columns: int) -> Tensor:
    if tuple(mask.shape) != (batch, columns):
        raise ConfigError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected {(batch, columns)}, of ones and zeros",
            field="attention_mask",
        )
    return mask.cpu() != 0


def _span(mask: Tensor) -> tuple[int, int]:
    ones = torch.nonzero(mask).flatten().tolist()
    if not ones:
        return 0, 0
    if ones[-1] - ones[0] + 1 != len(ones):
        raise ConfigError(
            "attention_mask: got a row with a hole, expected its ones in one piece", field="attention_mask"
        )
    return ones[0], ones[-1] + 1


def _check_tokens(index: int, hints: HintFile, ids: NDArray[Any]) -> None:
    count = max(0, min(hints.rows, len(ids) - hints.first_token))
    theirs, ours = hints.token_ids[:count], ids[hints.first_token : hints.first_token + count]
    if np.array_equal(theirs, ours):
        return
    at = int(np.nonzero(theirs != ours)[0][0])
    raise HintFormatError(
        f"rollout_hints[{index}]: token {int(theirs[at])} at position {hints.first_token + at}, the batch has "
        f"{int(ours[at])}; pair each sequence with its own hints",
        field="rollout_hints",
    )


def _moved(segment: Segment, hints: HintFile) -> HintFile:
    return replace(hints, first_token=hints.first_token + segment.start)


def _joined(parts: Sequence[tuple[Segment, HintFile]], ids: NDArray[Any]) -> HintFile:
    """One file for a packed row; columns that no file covers are marked missing."""
    first = parts[0][1]
    if any(isinstance(each, PackedHints) for _, each in parts):
        raise HintFormatError(
            "rollout_hints: packed hints in a row of several sequences; pad the batch to one sequence a row, or give "
            "files that `hints unpack` wrote",
            field="rollout_hints",
        )
    if any(each.recipe_id != first.recipe_id for _, each in parts):
        raise HintFormatError("rollout_hints: files of several recipes in one packed row", field="recipe_id")
    places = [_place(segment, each) for segment, each in parts]
    names = sorted({site.name for _, each in parts for site in each.sites})
    routed, present = _joined_routes(parts, places, len(ids))
    return HintFile(
        token_ids=ids.astype(np.int32),
        sites=tuple(_joined_site(name, parts, places, len(ids)) for name in names),
        recipe_id=first.recipe_id,
        model_digest=first.model_digest,
        weight_versions=((0, len(ids), "packed"),),
        routed_experts=routed,
        routed_present=present,
    )


def _place(segment: Segment, hints: HintFile) -> slice:
    start = segment.start + hints.first_token
    return slice(start, max(start, min(segment.stop, start + hints.rows)))


def _joined_site(name: str, parts: Sequence[tuple[Segment, HintFile]], places: list[slice], rows: int) -> Site:
    mine = [(at, site) for (_, each), at in zip(parts, places, strict=True) for site in each.sites if site.name == name]
    first = mine[0][1]
    if len({_kind(site) for _, site in mine}) != 1:
        raise HintFormatError(f"{name}: files of one packed row differ in layers, widths or scales", field=name)

    def gathered(attribute: str) -> Any:
        example = getattr(first, attribute)
        if example is None:
            return None
        out = np.zeros((rows, *example.shape[1:]), dtype=example.dtype)
        for at, site in mine:
            out[at] = getattr(site, attribute)[: at.stop - at.start]
        return out

    arrays = {each: gathered(each) for each in ("bits", "codes", "scales", "present", "global_log2", "global_scale")}
    return replace(first, **arrays)


def _kind(site: Site) -> tuple[Any, ...]:
    return site.layers, site.bits.shape[1:], site.code_kind, site.scale_kind, site.global_kind, site.groups


def _joined_routes(
    parts: Sequence[tuple[Segment, HintFile]], places: list[slice], rows: int
) -> tuple[NDArray[Any] | None, NDArray[np.bool_] | None]:
    known = [(at, each) for (_, each), at in zip(parts, places, strict=True) if each.routed_experts is not None]
    shapes = {each.routed_experts.shape[1:] for _, each in known if each.routed_experts is not None}
    if not known:
        return None, None
    if len(shapes) != 1:
        raise HintFormatError(
            "routed_experts: files of one packed row differ in layers or top-k", field="routed_experts"
        )
    out = np.zeros((rows, *shapes.pop()), dtype=np.int32)
    present = np.zeros(rows, dtype=np.bool_)
    for at, each in known:
        count = at.stop - at.start
        assert each.routed_experts is not None
        out[at] = each.routed_experts[:count]
        present[at] = True if each.routed_present is None else each.routed_present[:count]
    return out, present
