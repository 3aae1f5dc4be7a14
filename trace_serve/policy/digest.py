"""Content digests of files and directories, in the form `sha256:<hex>`."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trace_serve.errors import PolicyError

PREFIX = "sha256:"
_CHUNK = 1 << 20


def digest_bytes(data: bytes) -> str:
    """`sha256:` and the hex digest of the bytes."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def digest_file(path: Path | str) -> str:
    """The digest of a file's bytes.

    Raises:
        PolicyError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
    except OSError as exc:
        raise PolicyError(f"{path}: cannot be read ({exc.strerror}); restore the file", field=str(path)) from exc
    return PREFIX + digest.hexdigest()


def list_files(directory: Path | str) -> list[Path]:
    """Every regular file below a directory, sorted by its path relative to it (`/` separated, by code point).

    Raises:
        PolicyError: not a directory, or it contains a symlink, a special file, or a hidden file or directory.
    """
    root = Path(directory)
    if not root.is_dir():
        raise PolicyError(f"{root}: not a directory, expected a model or policy directory", field=str(root))
    return sorted(_walk(root), key=lambda path: path.relative_to(root).as_posix())


def _walk(directory: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as exc:
        raise PolicyError(f"{directory}: cannot be listed ({exc.strerror})", field=str(directory)) from exc
    for entry in entries:
        path = Path(entry.path)
        mode = entry.stat(follow_symlinks=False).st_mode
        kind = "a symlink" if stat.S_ISLNK(mode) else "a special file"
        if entry.name.startswith("."):
            raise PolicyError(f"{path}: hidden files are not part of a policy; remove it", field=str(path))
        if stat.S_ISDIR(mode):
            yield from _walk(path)
        elif stat.S_ISREG(mode):
            yield path
        else:
            raise PolicyError(f"{path}: is {kind}, expected a regular file; replace it with a copy", field=str(path))


def digest_directory(directory: Path | str, *, exclude: tuple[str, ...] = ()) -> str:
    """SHA-256 of the canonical JSON list of [relative path, size, sha256 hex], sorted by path.

    Empty directories do not count. What cannot be digested is refused; `exclude` names relative paths to leave out.

    Raises:
        PolicyError: see `list_files`; or a file that cannot be read.
    """
    root = Path(directory)
    rows = []
    for path in list_files(root):
        name = path.relative_to(root).as_posix()
        if name not in exclude:
            rows.append([name, path.stat().st_size, digest_file(path).removeprefix(PREFIX)])
    canonical = json.dumps(rows, separators=(",", ":"), ensure_ascii=True)
    return digest_bytes(canonical.encode())
