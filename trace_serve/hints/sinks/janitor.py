"""Keeps a hint directory within its age and size; touches only names that a sink writes."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from trace_serve.hints.sinks import atomic, marks
from trace_serve.hints.sinks.target import SUFFIX, check_name

_OURS = re.compile(
    rf"[A-Za-z0-9_-]{{1,128}}({re.escape(SUFFIX)}|\.({'|'.join(marks.KINDS)})\.json)"
    rf"|\.[A-Za-z0-9_.-]+\.[0-9a-f]{{12}}{re.escape(atomic.TEMPORARY)}"
)
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class Expired:
    """What was removed: hint files and their bytes; marks and abandoned temporary files are not counted."""

    files: int
    bytes: int


def expire(directory: Path, *, older_than_s: float | None = None, max_bytes: int | None = None) -> Expired:
    """Removes what is too old, then the oldest until the rest fits.

    Args:
        directory: one that a sink writes to; one that is missing is empty.
        older_than_s: age by modification time; None keeps files of any age.
        max_bytes: all files of a sink together; None does not limit them.
    """
    now = time.time()
    found = sorted(_entries(directory))
    total = sum(size for _, size, _ in found)
    files = freed = 0
    for modified, size, name in found:
        age = now - modified
        temporary = name.endswith(atomic.TEMPORARY)
        # A temporary file that is young is being written, by another engine perhaps.
        if temporary and age < _ABANDONED_S:
            continue
        too_old = older_than_s is not None and age > older_than_s
        too_much = max_bytes is not None and total > max_bytes
        if not (temporary or too_old or too_much):
            continue
        try:
            (directory / name).unlink()
        except OSError:
            continue
        total -= size
        if name.endswith(SUFFIX):
            files += 1
            freed += size
    return Expired(files, freed)


def forget(directory: Path, name: str) -> bool:
    """Removes one request's hints and marks, once the reader has them; False when there were none.

    Raises:
        ConfigError: the name could not be that of a request.
        OSError: no permission.
    """
    check_name(name)
    found = False
    for file_name in (name + SUFFIX, *(marks.file_name(name, kind) for kind in marks.KINDS)):
        with contextlib.suppress(FileNotFoundError):
            (directory / file_name).unlink()
            found = True
    return found


def _entries(directory: Path) -> list[tuple[float, int, str]]:
    """Modification time, size and name of each regular file that a sink wrote."""
    found = []
    try:
        scan = os.scandir(directory)
    except FileNotFoundError:
        return []
    with scan:
        for entry in scan:
            if not _OURS.fullmatch(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                state = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(state.st_mode):
                    found.append((state.st_mtime, state.st_size, entry.name))
    return found
