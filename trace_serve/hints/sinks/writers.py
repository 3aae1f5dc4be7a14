"""One writer a kind of place: a local directory, or a directory behind a URL."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any, Protocol

from trace_serve.errors import ConfigError
from trace_serve.hints.sinks import atomic, marks
from trace_serve.hints.sinks.marks import MarkKind
from trace_serve.hints.sinks.target import SUFFIX, AllowedTargets, Target

_PUTS_ARE_ATOMIC = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "r2", "obs", "cos"})
"""File systems where an object appears complete or not at all, and where renaming would copy it."""


class Writer(Protocol):
    """Raises any Exception of its file system; what it raises is worth another try only where `retries` says so."""

    retries: bool

    def write(self, name: str, payload: bytes) -> None:
        """Makes the hints visible, complete or not at all, and removes an older mark of that name."""

    def mark(self, name: str, kind: MarkKind, reason: str) -> None:
        """Leaves a mark where the hints would be."""


class DirectoryWriter:
    """Files `<name>.safetensors` in a local directory, which is made when it is missing.

    Args:
        directory: where to write.
        fences: the operator's directories; a link that leads out of all of them is refused.
    """

    retries = False

    def __init__(self, directory: Path, fences: tuple[Path, ...]) -> None:
        self._directory = directory
        self._fences = fences

    def _ready(self) -> Path:
        # Before it is made, because a link on the way could have it made elsewhere.
        resolved = self._directory.resolve()
        if not any(resolved.is_relative_to(fence.resolve()) for fence in self._fences):
            raise ConfigError(f"{self._directory}: leads to {resolved}, outside of what the operator allowed")
        resolved.mkdir(parents=True, exist_ok=True)
        return resolved

    def write(self, name: str, payload: bytes) -> None:
        directory = self._ready()
        atomic.write(directory, name + SUFFIX, [payload])
        for kind in marks.KINDS:
            (directory / marks.file_name(name, kind)).unlink(missing_ok=True)

    def mark(self, name: str, kind: MarkKind, reason: str) -> None:
        atomic.write(self._ready(), marks.file_name(name, kind), [marks.content(name, kind, reason)])


class UrlWriter:
    """Objects `<url>/<name>.safetensors` through fsspec; its own configuration has credentials and options."""

    retries = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._scheme = url.partition("://")[0]

    def _file_system(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(self._url)
        return file_system, str(path).rstrip("/")

    def write(self, name: str, payload: bytes) -> None:
        file_system, directory = self._file_system()
        self._put(file_system, directory, name + SUFFIX, payload)
        for kind in marks.KINDS:
            with contextlib.suppress(FileNotFoundError):
                file_system.rm_file(f"{directory}/{marks.file_name(name, kind)}")

    def mark(self, name: str, kind: MarkKind, reason: str) -> None:
        file_system, directory = self._file_system()
        self._put(file_system, directory, marks.file_name(name, kind), marks.content(name, kind, reason))

    def _put(self, file_system: Any, directory: str, file_name: str, data: bytes) -> None:
        path = f"{directory}/{file_name}"
        if self._scheme in _PUTS_ARE_ATOMIC:
            file_system.pipe_file(path, data)
            return
        file_system.makedirs(directory, exist_ok=True)
        temporary = f"{directory}/.{file_name}.{secrets.token_hex(6)}{atomic.TEMPORARY}"
        try:
            file_system.pipe_file(temporary, data)
            file_system.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                file_system.rm_file(temporary)
            raise


def open_writer(allowed: AllowedTargets, target: Target) -> Writer:
    """The writer of a `file` or `url` target."""
    if target.remote:
        return UrlWriter(target.url)
    return DirectoryWriter(allowed.directory(target), allowed.fences(target))
