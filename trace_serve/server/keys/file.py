"""The key file on disk: read with its permissions checked, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from trace_serve.errors import ConfigError
from trace_serve.server.keys.key import KeyEntry, KeyFile
from trace_serve.server.keys.private import Stamp, read_private

FLAG = "--key-file"


def read_keys(path: Path) -> tuple[KeyFile, Stamp]:
    """The checked contents of a key file, and the stamp of what was read.

    Raises:
        ConfigError: not there, open to others, or not a key file; the entry and field at fault are named.
    """
    content, stamp = read_private(path, flag=FLAG)
    try:
        return KeyFile.model_validate_json(content), stamp
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "contents"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{FLAG}: {path}: {where}: {message}; see docs/security.md", field="key_file") from None


def write_keys(path: Path, keys: list[KeyEntry]) -> None:
    """Replaces the file in one step, readable by its owner only; an existing file keeps its owner.

    Raises:
        ConfigError: the directory cannot be written.
    """
    content = KeyFile(version=1, keys=keys).model_dump_json(indent=2) + "\n"
    target = path.resolve()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as exc:
        raise ConfigError(f"{FLAG}: {path} cannot be written ({exc.strerror})", field="key_file") from exc
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode())
            if target.exists() and os.geteuid() == 0:
                owner = target.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other `trace-serve keys` commands out while one reads, changes and writes a key file.

    Raises:
        ConfigError: there is no such directory.
    """
    try:
        handle = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(
            f"{FLAG}: the directory of {path} cannot be opened ({exc.strerror})", field="key_file"
        ) from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
