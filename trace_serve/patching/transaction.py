"""Replaces several files at once: either all of them, or none.

A file is never written in place. Installers hard-link packages from a shared cache, so writing in place would change
the cache and every other environment; a new file is written beside the old one and renamed over it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from trace_serve.errors import PatchError

_NEW = ".trace-serve-new"
_OLD = ".trace-serve-old"


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Waits until no other process changes the files below `root`."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_files(root: Path, changes: Mapping[str, bytes | None]) -> None:
    """Gives each file its new content; `None` deletes the file.

    Modes and owners are kept. Stale bytecode of every changed file is removed, because Python compares only whole
    seconds and sizes. A process that is killed half-way leaves some files changed and no file torn.

    Args:
        root: what the paths are relative to.
        changes: new content by path.

    Raises:
        PatchError: something could not be written; every file is as it was before.
    """
    paths = [root / path for path in changes]
    undo: list[tuple[Path, bool]] = []
    created: list[Path] = []
    try:
        for path, content in zip(paths, changes.values(), strict=True):
            _stage(path, content, created)
        for path, content in zip(paths, changes.values(), strict=True):
            undo.append((path, _keep_old(path)))
            _swap(path, content)
        for path in paths:
            _drop_bytecode(path)
        for directory in {path.parent for path in paths}:
            _sync_directory(directory)
    except BaseException as exc:
        _roll_back(undo)
        remove_leftovers(paths)
        for directory in reversed(created):
            with contextlib.suppress(OSError):
                directory.rmdir()
        if isinstance(exc, OSError):
            raise PatchError(
                f"{exc.filename or root}: cannot be replaced: {exc.strerror or exc}; nothing was changed",
                field="target",
            ) from exc
        raise
    remove_leftovers(paths)
    for path, content in zip(paths, changes.values(), strict=True):
        if content is None:
            _remove_empty_directories(path.parent, root)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _stage(path: Path, content: bytes | None, created: list[Path]) -> None:
    if content is None:
        return
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir()
            created.append(parent)
    staged = _beside(path, _NEW)
    with staged.open("xb") as handle:
        handle.write(content)
        handle.flush()
        if path.exists():
            state = path.stat()
            os.fchmod(handle.fileno(), stat.S_IMODE(state.st_mode))
            if (state.st_uid, state.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(handle.fileno(), state.st_uid, state.st_gid)
        else:
            os.fchmod(handle.fileno(), 0o644)
        os.fsync(handle.fileno())


def _keep_old(path: Path) -> bool:
    """Keeps a second name of the old file for a roll-back; False when there is no old file."""
    if not path.exists():
        return False
    try:
        os.link(path, _beside(path, _OLD))
    except OSError:
        # A file system without hard links.
        shutil.copy2(path, _beside(path, _OLD))
    return True


def _swap(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        _beside(path, _NEW).replace(path)


def _roll_back(undo: list[tuple[Path, bool]]) -> None:
    for path, had_old in reversed(undo):
        if had_old:
            _beside(path, _OLD).replace(path)
        else:
            path.unlink(missing_ok=True)
        _drop_bytecode(path)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Removes the helper files that a run leaves beside these files when it is killed."""
    for path in paths:
        for suffix in (_NEW, _OLD):
            with contextlib.suppress(OSError):
                _beside(path, suffix).unlink(missing_ok=True)


def _drop_bytecode(path: Path) -> None:
    if path.suffix != ".py":
        return
    # The same directory for every interpreter and optimization level; it follows PYTHONPYCACHEPREFIX.
    cache = Path(importlib.util.cache_from_source(str(path))).parent
    for entry in cache.glob(f"{path.stem}.*.pyc"):
        entry.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_empty_directories(directory: Path, root: Path) -> None:
    """Removes what only held a deleted file, up to the package itself."""
    while directory != root and directory.parent != root:
        with contextlib.suppress(OSError):
            (directory / "__pycache__").rmdir()
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent
