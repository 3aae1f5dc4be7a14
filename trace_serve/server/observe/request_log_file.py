"""A file of whole lines, rotated by size, readable by its owner alone and written by one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from trace_serve.errors import ConfigError

_TAIL_BYTES = 1 << 16


class LogFile:
    """Appends lines to `path`; when it is full it becomes `path.1`, `path.1` becomes `path.2`, and so on.

    A line is one `write`; one that a kill or a full disk cut short is removed, here or at the next `open`.

    Args:
        path: the file; its directory exists.
        max_bytes: size at which a new one is begun; a longer single line has a file of its own.
        files: how many are kept, the current one included; at least 1.
    """

    def __init__(self, path: Path, *, max_bytes: int, files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._fd: int | None = None
        self._size = 0

    def open(self) -> int:
        """Opens or makes the file with mode 0600 and returns how many bytes of a broken last line were removed.

        Raises:
            ConfigError: it cannot be written, is no regular file, or another process writes it.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"--request-log {self._path}: cannot be opened for writing ({exc.strerror})", field="request_log"
            ) from exc
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(
                    f"--request-log {self._path}: is not a regular file; name another", field="request_log"
                )
            self._lock(fd)
            os.fchmod(fd, 0o600)
            removed = _cut_broken_line(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._size = fd, os.fstat(fd).st_size
        return removed

    def append(self, line: bytes) -> None:
        """Writes one line, line break included.

        Raises:
            OSError: the disk is full or the like; nothing of the line is in the file.
        """
        if self._size and self._size + len(line) > self._max_bytes:
            self._rotate()
        if self._fd is None:
            self.open()
        assert self._fd is not None
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _rotate(self) -> None:
        if self._files == 1:
            assert self._fd is not None
            os.ftruncate(self._fd, 0)
            self._size = 0
            return
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number - 1).replace(self._numbered(number))
        self.close()
        self._size = 0
        self.open()

    def _numbered(self, number: int) -> Path:
        return self._path if number == 0 else self._path.with_name(f"{self._path.name}.{number}")

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(
                f"--request-log {self._path}: another process writes it; give each server a file of its own",
                field="request_log",
            ) from exc


def _cut_broken_line(fd: int) -> int:
    """Removes what stands behind the last line break; returns how many bytes that were."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return size - end
