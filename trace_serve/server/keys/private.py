"""Reading files that nobody else on the machine may read or replace: key files and TLS private keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trace_serve.errors import ConfigError

Stamp = tuple[int, int, int, int]
"""Device, inode, size and modification time (ns): another stamp means that the file was edited or replaced."""


def stamp_of(path: Path) -> Stamp | None:
    """The file's stamp, symlinks followed; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_private(path: Path, *, flag: str, limit: int = 1 << 20) -> tuple[bytes, Stamp]:
    """The bytes of a file that only its owner can read, and the stamp it had when it was read.

    A file that belongs to root, while the server is not root, may be readable by a group: that is how Kubernetes
    mounts a secret for a pod with an `fsGroup`. Permissions are those of the opened file, so that it cannot be
    exchanged between check and read.

    Args:
        path: the file; a symlink is followed.
        flag: the option that named it, for messages.
        limit: largest size in bytes.

    Raises:
        ConfigError: not there, not a regular file, too large, or open to others.
    """
    field = flag.lstrip("-").replace("-", "_")
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"{flag}: {path} cannot be read ({exc.strerror})", field=field) from exc
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{flag}: {path} is not a regular file", field=field)
        _check_mode(path, found, flag, field)
        if found.st_size > limit:
            raise ConfigError(f"{flag}: {path} has {found.st_size} bytes, expected at most {limit}", field=field)
        content = os.read(handle, limit)
    finally:
        os.close(handle)
    return content, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _check_mode(path: Path, found: os.stat_result, flag: str, field: str) -> None:
    me = os.geteuid()
    if found.st_uid not in (me, 0):
        raise ConfigError(
            f"{flag}: {path} belongs to user {found.st_uid}, expected {me} (the one running this) or root; chown it",
            field=field,
        )
    mounted = found.st_uid == 0 and me != 0
    forbidden = 0o037 if mounted else 0o077
    if found.st_mode & forbidden:
        raise ConfigError(
            f"{flag}: {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others than its owner can use it; "
            f"run chmod 600 {path}",
            field=field,
        )
