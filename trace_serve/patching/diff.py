"""One file's part of a unified diff, applied and undone exactly: no fuzz, no offset."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from unidiff.constants import DEV_NULL
from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchedFile, PatchSet

from trace_serve.errors import PatchError

_AFTER_HUNK = re.compile(r"@@ |diff --git |--- |\\ |-- $|\s*$")


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines `old` at 0-based index `old_start` that become `new` at `new_start`."""

    old_start: int
    old: tuple[str, ...]
    new_start: int
    new: tuple[str, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.new_start, self.new, self.old_start, self.old)


@dataclass(frozen=True)
class FileDiff:
    """The change of one file.

    Attributes:
        path: relative to the directory that holds the package, with forward slashes.
        creates: the file does not exist before the change.
    """

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]

    def forward(self, content: bytes | None) -> bytes:
        """The file after the change; `None` stands for a file that does not exist.

        Raises:
            PatchError: the content is not the one the diff was made for.
        """
        if self.creates != (content is None):
            expected = "no such file" if self.creates else "an existing file"
            raise PatchError(f"{self.path}: the diff expects {expected}", field=self.path)
        return _rewrite(self.path, content or b"", self.hunks)

    def backward(self, content: bytes) -> bytes | None:
        """The file before the change; the exact inverse of `forward`.

        Raises:
            PatchError: the content is not what `forward` produces.
        """
        before = _rewrite(self.path, content, [hunk.reversed() for hunk in self.hunks])
        if not self.creates:
            return before
        if before:
            raise PatchError(f"{self.path}: has lines that the diff did not create", field=self.path)
        return None


def _rewrite(path: str, content: bytes, hunks: Sequence[Hunk]) -> bytes:
    lines = split_lines(content.decode("utf-8", "surrogateescape"))
    out: list[str] = []
    cursor = 0
    for hunk in hunks:
        end = hunk.old_start + len(hunk.old)
        out += lines[cursor : hunk.old_start]
        fits = (
            hunk.old_start >= cursor and len(out) == hunk.new_start and tuple(lines[hunk.old_start : end]) == hunk.old
        )
        if not fits:
            raise PatchError(f"{path}: the hunk for line {hunk.old_start + 1} does not match the file", field=path)
        out += hunk.new
        cursor = end
    out += lines[cursor:]
    return "".join(out).encode("utf-8", "surrogateescape")


def split_lines(text: str) -> list[str]:
    """Lines with their ends, as a diff counts them."""
    # str.splitlines would also split at form feeds and Unicode separators, which a diff counts as part of a line.
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def parse_diff(name: str, text: str) -> tuple[FileDiff, ...]:
    """Reads every file change of one patch.

    Args:
        name: what to call the patch in an error.
        text: the whole patch; what precedes the first file is ignored.

    Raises:
        PatchError: not a unified diff, or a kind of change that is not supported (rename, deletion, mode, binary,
            a path outside the package).
    """
    try:
        parsed = PatchSet(io.StringIO(text, newline="\n"))
    except UnidiffParseError as exc:
        raise PatchError(f"{name}: not a unified diff: {str(exc).strip()}", field=name) from exc
    diffs = tuple(_file_diff(name, file) for file in parsed)
    if not diffs:
        raise PatchError(f"{name}: got no file change, expected a unified diff", field=name)
    _check_hunk_ends(name, text, parsed)
    paths = [diff.path for diff in diffs]
    for path in paths:
        if paths.count(path) > 1:
            raise PatchError(f"{name}: changes {path} in two places; merge them", field=name)
    return diffs


def _file_diff(name: str, file: PatchedFile) -> FileDiff:
    creates = file.source_file == DEV_NULL
    modes = {"".join(line.split()[:2]) for line in file.patch_info or ()}
    unsupported = {
        "deletes a file": file.target_file == DEV_NULL,
        "is binary": file.is_binary_file,
        "changes a file mode": bool(modes & {"oldmode", "newmode"}),
        "renames a file": not creates and file.source_file[2:] != file.target_file[2:],
        "changes nothing": not creates and not file,
    }
    for what, found in unsupported.items():
        if found:
            raise PatchError(
                f"{name}: {file.path} {what}, expected a change or a new file of text; rewrite the patch", field=name
            )
    path = _package_path(name, file.target_file, "b/")
    if not creates:
        _package_path(name, file.source_file, "a/")
    return FileDiff(path=path, creates=creates, hunks=tuple(_hunk(hunk) for hunk in file))


def _package_path(name: str, path: str, prefix: str) -> str:
    parts = PurePosixPath(path).parts
    inside = path.startswith(prefix + "sglang/") and path == "/".join(parts) and ".." not in parts
    if not inside or not path.isprintable():
        raise PatchError(f"{name}: got path {path!r}, expected {prefix}sglang/...", field=name)
    return path.removeprefix(prefix)


def _hunk(hunk: ParsedHunk) -> Hunk:
    sides: dict[str, list[str]] = {"-": [], "+": []}
    for touched, value in _lines(hunk):
        for side in touched:
            sides[side].append(value)
    # A side without lines names the line it follows, any other side the line it starts at.
    return Hunk(
        old_start=hunk.source_start - (1 if hunk.source_length else 0),
        old=tuple(sides["-"]),
        new_start=hunk.target_start - (1 if hunk.target_length else 0),
        new=tuple(sides["+"]),
    )


def _lines(hunk: ParsedHunk) -> Iterator[tuple[str, str]]:
    """Each line with the sides it stands on; a line that the no-newline marker follows loses its newline."""
    sides = {" ": "-+", "-": "-", "+": "+"}
    pending: tuple[str, str] | None = None
    for line in hunk:
        if line.line_type == "\\" and pending is not None:
            pending = (pending[0], pending[1].removesuffix("\n"))
        elif line.line_type in sides:
            if pending is not None:
                yield pending
            pending = (sides[line.line_type], line.value)
    if pending is not None:
        yield pending


def _check_hunk_ends(name: str, text: str, parsed: PatchSet) -> None:
    # The parser takes lines beyond a hunk's announced length for comments and would drop them without a word.
    raw = text.split("\n")
    for file in parsed:
        for hunk in file:
            last = max((line.diff_line_no or 0 for line in hunk), default=0)
            if last < len(raw) and not _AFTER_HUNK.match(raw[last]):
                raise PatchError(
                    f"{name}: line {last + 1} is beyond the length its hunk announces; regenerate the patch", field=name
                )
