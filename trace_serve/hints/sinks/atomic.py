"""Writing a local file that is visible complete or not at all, and never through a symbolic link."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

TEMPORARY = ".tmp"
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


def write(directory: Path, file_name: str, parts: Iterable[bytes], *, mode: int = 0o666) -> None:
    """Writes the parts, one after the other, into a temporary file and renames it over `file_name`.

    Not synced to the disk: hints are worth nothing after a power failure, and the format's checksums tell.

    Args:
        directory: exists.
        file_name: one path component; a link of that name is replaced, not followed.
        parts: the content.
        mode: permissions, before the umask.

    Raises:
        OSError: disk full, no permission and so on; nothing is left behind.
    """
    temporary = directory / f".{file_name}.{secrets.token_hex(6)}{TEMPORARY}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as handle:
            for part in parts:
                view = memoryview(part)
                # A raw write may be short, near a full disk for one.
                while view:
                    view = view[handle.write(view) :]
        temporary.replace(directory / file_name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path) -> bytes:
    """Raises:
    OSError: not there, or a link.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | _NO_FOLLOW), "rb") as handle:
        return handle.read()
