"""The ordered patches of one directory, and what all of them together do to a file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trace_serve.errors import PatchError
from trace_serve.patching.diff import FileDiff, parse_diff

HEADER_FIELDS = ("Subject", "Why", "Obsolete-when")
"""What the text above a patch's first diff has to say."""

_FIELD = re.compile(r"([A-Z][A-Za-z-]*): ?(.*)")
_FIRST_DIFF = re.compile(r"^(diff --git |--- )", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """One topic: its file name, the header fields above the diff, and the files it changes."""

    name: str
    header: Mapping[str, str]
    files: tuple[FileDiff, ...]


@dataclass(frozen=True)
class Series:
    """The patches of one directory in the order in which they apply."""

    directory: Path
    patches: tuple[Patch, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every touched file once, in the order of first mention."""
        return tuple(dict.fromkeys(file.path for patch in self.patches for file in patch.files))

    def diffs(self, path: str) -> list[tuple[Patch, FileDiff]]:
        """What each patch does to one file, in order."""
        return [(patch, file) for patch in self.patches for file in patch.files if file.path == path]

    def forward(self, path: str, content: bytes | None) -> bytes:
        """One file after all patches; `None` stands for a file that does not exist.

        Raises:
            PatchError: a hunk does not match, or no patch touches the file.
        """
        for patch, diff in self.diffs(path):
            with _named(patch):
                content = diff.forward(content)
        if content is None:
            raise PatchError(f"{path}: no patch touches it", field=path)
        return content

    def backward(self, path: str, content: bytes) -> bytes | None:
        """One file before all patches; the exact inverse of `forward`.

        Raises:
            PatchError: a hunk does not match.
        """
        before: bytes | None = content
        for patch, diff in reversed(self.diffs(path)):
            if before is None:
                raise PatchError(f"{patch.name}: {path} is created by a later patch of the series", field=path)
            with _named(patch):
                before = diff.backward(before)
        return before


@contextlib.contextmanager
def _named(patch: Patch) -> Iterator[None]:
    try:
        yield
    except PatchError as exc:
        raise PatchError(f"{patch.name}: {exc}", field=exc.field) from exc


def load_series(directory: Path) -> Series:
    """Reads `series` and every patch it names.

    Raises:
        PatchError: a file is missing or unreadable, a name is not that of a patch beside the series, a patch file is
            not listed, or a patch is not a supported diff.
    """
    names = _read_names(directory)
    patches = []
    for name in names:
        text = _read(directory / name)
        patches.append(Patch(name=name, header=_header(text), files=parse_diff(name, text)))
    unlisted = sorted({path.name for path in directory.glob("*.patch")} - set(names))
    if unlisted:
        raise PatchError(f"{directory}/series: {unlisted[0]} is not listed; add it or remove the file", field="series")
    return Series(directory=directory, patches=tuple(patches))


def check_headers(series: Series) -> None:
    """Raises:
    PatchError: a patch does not say what it does, why it exists, or what would make it unnecessary.
    """
    for patch in series.patches:
        for field in HEADER_FIELDS:
            if not patch.header.get(field):
                raise PatchError(
                    f"{patch.name}: no `{field}:` above the diff; expected {', '.join(HEADER_FIELDS)}", field=patch.name
                )


def _read_names(directory: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in _read(directory / "series").split("\n"))
    names = [line for line in lines if line]
    if not names:
        raise PatchError(f"{directory}/series: lists no patch", field="series")
    for name in names:
        if "/" in name or not name.endswith(".patch") or names.count(name) > 1:
            raise PatchError(
                f"{directory}/series: got {name!r}, expected distinct names of *.patch files in the same directory",
                field="series",
            )
    return names


def _read(path: Path) -> str:
    try:
        # Not read_text: it would turn the CRLF of a patched file's lines into LF.
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as exc:
        raise PatchError(f"{path}: cannot be read: {exc.strerror}", field=path.name) from exc


def _header(text: str) -> dict[str, str]:
    first_diff = _FIRST_DIFF.search(text)
    fields: dict[str, str] = {}
    current = None
    for line in text[: first_diff.start() if first_diff else 0].split("\n"):
        match = _FIELD.match(line)
        if match:
            current = match[1]
            fields[current] = match[2].strip()
        elif current is not None and line.startswith((" ", "\t")):
            fields[current] = f"{fields[current]} {line.strip()}".strip()
        else:
            current = None
    return fields
