"""Digests of policy directories, computed once as long as no file's inode says that it changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path

from trace_serve.policy.digest import digest_directory, list_files


class DigestCache:
    """Remembers directory digests under the inode data of every file; safe to use from several threads.

    The key covers path, size, device, inode number, and the times of the last write and of the last change of the
    inode. The latter cannot be set by a program, so an edit shows even when size and time of writing were restored.

    Args:
        path: JSON file that outlives the process; None keeps them in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, str]] = _read(path)

    def lookup(self, directory: Path) -> str:
        """The directory's digest, from the cache where nothing has changed.

        Raises:
            PolicyError: see `digest_directory`.
        """
        before = fingerprint(directory)
        with self._lock:
            known = self._known.get(str(directory))
        return known[1] if known is not None and known[0] == before else self.recompute(directory)

    def recompute(self, directory: Path) -> str:
        """Reads every byte, and remembers the digest if no file changed meanwhile.

        Raises:
            PolicyError: see `digest_directory`.
        """
        before = fingerprint(directory)
        digest = digest_directory(directory)
        if fingerprint(directory) == before:
            with self._lock:
                self._known[str(directory)] = (before, digest)
                self._write()
        return digest

    def _write(self) -> None:
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a cache that cannot be kept is no reason to refuse a policy
            temporary.write_text(json.dumps(self._known, indent=1, sort_keys=True), encoding="utf-8")
            temporary.replace(self._path)


def fingerprint(directory: Path) -> str:
    """SHA-256 over the inode data of every file below a directory.

    Raises:
        PolicyError: see `list_files`.
    """
    rows = []
    for path in list_files(directory):
        seen = path.stat()
        rows.append(
            [
                str(path.relative_to(directory)),
                seen.st_size,
                seen.st_dev,
                seen.st_ino,
                seen.st_mtime_ns,
                seen.st_ctime_ns,
            ]
        )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _read(path: Path | None) -> dict[str, tuple[str, str]]:
    """What an earlier process knew; nothing if the file is missing or damaged, because it can be computed again."""
    if path is None:
        return {}
    try:
        raw = json.loads(path.read_text("utf-8"))
        return {str(name): (str(mark), str(digest)) for name, (mark, digest) in raw.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
