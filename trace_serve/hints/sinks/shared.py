"""Hints in shared memory, for a trainer on the same machine: one directory of files in /dev/shm for each engine.

Plain files and not `multiprocessing.shared_memory`: Python's resource tracker would delete a segment when a reader
exits, and writing to a full /dev/shm through a mapping kills the process where `write` reports an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.hints.sinks import atomic, marks
from trace_serve.hints.sinks.marks import MarkKind
from trace_serve.hints.sinks.target import check_name

ROOT = Path("/dev/shm")
SUFFIX = ".hints"
MAGIC = b"TRHINTS1"
_HEADER = struct.Struct("<8sB7xQ32s")
_STATE_OFFSET = 8
_PUBLISHED, _READ = 0, 1
_PREFIX = "trace-serve-hints-"
_NEW = ".trace-serve-hints-"
_LOCK = ".lock"
_MAX_MARKS = 256
_ABANDONED_S = 60.0


def directory_of(run_id: str, root: Path = ROOT) -> Path:
    """Where the engine of that run id keeps its hints."""
    return root / f"{_PREFIX}{check_name(run_id)}"


class SharedSpace:
    """The writing side: made by the process that writes, after it forked. One thread writes.

    Holds an advisory lock for as long as the process lives; `remove_stale` removes what nobody holds.

    Args:
        run_id: names the engine in `shm://<run id>/<request id>`.
        max_bytes: all published hints together; to make room, hints that were read go first, then the oldest.
        on_expired: called with the name and size of hints that went before anybody read them.
        root: a tmpfs.

    Raises:
        OSError: the directory cannot be made.
    """

    retries = False

    def __init__(
        self, run_id: str, max_bytes: int, on_expired: Callable[[str, int], None], *, root: Path = ROOT
    ) -> None:
        self._max_bytes = max_bytes
        self._on_expired = on_expired
        self._sizes: dict[str, int] = {}
        self._marks: list[Path] = []
        self.directory = directory_of(run_id, root)
        # Locked before it gets its name, so that nobody takes it for an abandoned one.
        new = root / f"{_NEW}{secrets.token_hex(8)}"
        new.mkdir(mode=0o700)
        self._lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.directory)
        except BaseException:
            os.close(self._lock)
            shutil.rmtree(new, ignore_errors=True)
            raise

    def write(self, name: str, payload: bytes) -> None:
        """Publishes hints under a name; an older one of that name is replaced.

        Raises:
            ConfigError: larger than the whole budget.
            OSError: /dev/shm is full.
        """
        size = _HEADER.size + len(payload)
        if size > self._max_bytes:
            raise ConfigError(f"shm: got {size} bytes, more than the whole budget of {self._max_bytes} bytes")
        self._sizes.pop(name, None)
        self._make_room(size)
        header = _HEADER.pack(MAGIC, _PUBLISHED, len(payload), hashlib.sha256(payload).digest())
        atomic.write(self.directory, name + SUFFIX, [header, payload], mode=0o600)
        self._sizes[name] = size
        for kind in marks.KINDS:
            (self.directory / marks.file_name(name, kind)).unlink(missing_ok=True)

    def mark(self, name: str, kind: MarkKind, reason: str) -> None:
        atomic.write(self.directory, marks.file_name(name, kind), [marks.content(name, kind, reason)], mode=0o600)
        self._marks.append(self.directory / marks.file_name(name, kind))
        while len(self._marks) > _MAX_MARKS:
            self._marks.pop(0).unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the directory and everything in it; safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _make_room(self, size: int) -> None:
        if sum(self._sizes.values()) + size <= self._max_bytes:
            return
        states = {name: _state(self._path(name)) for name in self._sizes}
        for name in [name for name, state in states.items() if state is None]:
            del self._sizes[name]
        # A stable sort: within each group the oldest goes first.
        for name in sorted(self._sizes, key=lambda name: states[name] != _READ):
            if sum(self._sizes.values()) + size <= self._max_bytes:
                return
            freed = self._sizes.pop(name)
            self._path(name).unlink(missing_ok=True)
            if states[name] != _READ:
                with contextlib.suppress(OSError):
                    self.mark(name, "expired", "shared memory was needed for newer hints")
                self._on_expired(name, freed)

    def _path(self, name: str) -> Path:
        return self.directory / (name + SUFFIX)


def read_segment(path: Path) -> bytes:
    """The hints in one file, checked, and noted as read so that they go first when room is needed.

    Raises:
        OSError: not there.
        HintFormatError: damaged.
    """
    data = atomic.read(path)
    if len(data) < _HEADER.size:
        raise HintFormatError(f"{path}: got {len(data)} bytes, expected a header of {_HEADER.size}", field=str(path))
    magic, _, length, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if magic != MAGIC or len(payload) != length or hashlib.sha256(payload).digest() != checksum:
        raise HintFormatError(f"{path}: wrong magic, length or checksum; the segment is damaged", field=str(path))
    # A reader of another user may read and not write; its hints then go in order of age.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, bytes([_READ]), _STATE_OFFSET)
        finally:
            os.close(descriptor)
    return payload


def remove_stale(root: Path = ROOT) -> list[str]:
    """Removes the directories of engines that are gone; call it when an engine starts, and after one was killed.

    Returns:
        The run ids that were removed.
    """
    removed = []
    for path in [*root.glob(f"{_PREFIX}*"), *root.glob(f"{_NEW}*")]:
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            # An engine that is just starting has made its directory, and not locked it yet.
            if path.name.startswith(_NEW) and time.time() - path.stat().st_mtime < _ABANDONED_S:
                continue
            if _abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name.removeprefix(_PREFIX))
    return removed


def _abandoned(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _state(path: Path) -> int | None:
    """The state byte of a segment, or None where a reader released it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.pread(descriptor, 1, _STATE_OFFSET)[0]
    finally:
        os.close(descriptor)
