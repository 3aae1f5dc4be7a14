"""Whether the patches fit another release: exactly, at other lines, not at all, or because it has them already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trace_serve.patching.diff import FileDiff, Hunk, split_lines
from trace_serve.patching.series import Patch, Series


class Fit(StrEnum):
    """CLEAN: applies as it is. OFFSET: every hunk is found, some at another line. PRESENT: the release has the change
    already. CONFLICT: a hunk is not found, or a file is missing.
    """

    CLEAN = "clean"
    OFFSET = "offset"
    PRESENT = "present"
    CONFLICT = "conflict"


_ORDER = (Fit.CLEAN, Fit.OFFSET, Fit.PRESENT, Fit.CONFLICT)


@dataclass(frozen=True)
class HunkFit:
    """Attributes:
    path: the file.
    line: where the patch has the hunk, counted from 1.
    fit: how it fits.
    offset: lines between where the patch has it and where it was found; 0 where it was not found.
    detail: what is wrong; empty where it applies.
    """

    path: str
    line: int
    fit: Fit
    offset: int = 0
    detail: str = ""


@dataclass(frozen=True)
class PatchFit:
    name: str
    subject: str
    fit: Fit
    hunks: tuple[HunkFit, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "fit": self.fit.value,
            "hunks": [
                {"path": h.path, "line": h.line, "fit": h.fit.value, "offset": h.offset, "detail": h.detail}
                for h in self.hunks
            ],
        }


def fit_series(series: Series, read: Callable[[str], bytes | None]) -> tuple[PatchFit, ...]:
    """Tries each patch on the files as the earlier patches of the series leave them.

    Args:
        series: the patches.
        read: content of a file, None where there is none.
    """
    files: dict[str, bytes | None] = {}
    fits = []
    for patch in series.patches:
        hunks: list[HunkFit] = []
        for diff in patch.files:
            content = files[diff.path] if diff.path in files else read(diff.path)
            found, after = _fit_file(diff, content)
            hunks += found
            files[diff.path] = content if after is None else after
        fits.append(_patch_fit(patch, hunks))
    return tuple(fits)


def _patch_fit(patch: Patch, hunks: list[HunkFit]) -> PatchFit:
    found = {hunk.fit for hunk in hunks}
    worst = max(found, key=_ORDER.index)
    # A part of the change being there already is a conflict with the rest.
    fit = Fit.CONFLICT if Fit.PRESENT in found and len(found) > 1 else worst
    return PatchFit(patch.name, patch.header.get("Subject", patch.name), fit, tuple(hunks))


def _fit_file(diff: FileDiff, content: bytes | None) -> tuple[list[HunkFit], bytes | None]:
    """How each hunk fits, and the file with those that do; None where there is no file."""
    if diff.creates:
        if content is None:
            return [HunkFit(diff.path, 1, Fit.CLEAN)], diff.forward(None)
        if content == diff.forward(None):
            return [HunkFit(diff.path, 1, Fit.PRESENT, detail="the release has this file already")], content
        return [HunkFit(diff.path, 1, Fit.CONFLICT, detail="the release has another file of that name")], content
    if content is None:
        return [HunkFit(diff.path, h.old_start + 1, Fit.CONFLICT, detail="no such file") for h in diff.hunks], None
    lines = split_lines(content.decode("utf-8", "surrogateescape"))
    out: list[str] = []
    fits = []
    cursor = drift = 0
    for hunk in diff.hunks:
        at = _nearest(lines, hunk.old, hunk.old_start + drift, cursor)
        if at is None:
            fits.append(_missing(diff.path, hunk, lines))
            continue
        offset = at - hunk.old_start
        fits.append(HunkFit(diff.path, hunk.old_start + 1, Fit.OFFSET if offset else Fit.CLEAN, offset))
        out += [*lines[cursor:at], *hunk.new]
        cursor, drift = at + len(hunk.old), offset
    out += lines[cursor:]
    return fits, "".join(out).encode("utf-8", "surrogateescape")


def _missing(path: str, hunk: Hunk, lines: Sequence[str]) -> HunkFit:
    line = hunk.old_start + 1
    if _nearest(lines, hunk.new, hunk.new_start, 0) is not None:
        return HunkFit(path, line, Fit.PRESENT, detail="the release has this change already")
    known = set(lines)
    first = next((text for text in hunk.old if text not in known), None)
    if first is None:
        return HunkFit(path, line, Fit.CONFLICT, detail="its lines are there, but not together")
    return HunkFit(path, line, Fit.CONFLICT, detail=f"the release has no line {first.strip()!r}")


def _nearest(lines: Sequence[str], wanted: tuple[str, ...], expected: int, start: int) -> int | None:
    """Where `wanted` stands from `start` on, as near to `expected` as possible."""
    if not wanted:
        # An insertion without context: only the line number says where.
        return expected if start <= expected <= len(lines) else None
    last = len(lines) - len(wanted)
    for at in sorted(range(start, last + 1), key=lambda at: abs(at - expected)):
        if lines[at] == wanted[0] and tuple(lines[at : at + len(wanted)]) == wanted:
            return at
    return None
