"""The reading side: gets hints from where a receipt says they go, and says why they never will be there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from trace_serve.errors import ConfigError, EngineError
from trace_serve.hints.sinks import atomic, marks, shared
from trace_serve.hints.sinks.target import LOCAL_SCHEMES, SUFFIX, check_name

_SHM = "shm://"


def fetch(uri: str, *, timeout_s: float = 0.0, poll_s: float = 0.02, shm_root: Path = shared.ROOT) -> bytes:
    """The bytes of one request's hints.

    Args:
        uri: from a receipt: `file:///dir/id.safetensors`, `shm://run/id`, or a URL that fsspec reads.
        timeout_s: how long to wait for hints that are still in the engine's queue.
        poll_s: pause between two looks.
        shm_root: where shared memory is mounted.

    Raises:
        EngineError: the engine dropped them, could not write them, or expired them (the reason is in the message), or
            they did not appear in time.
        HintFormatError: a segment of shared memory is damaged.
        ConfigError: not such a URI.
    """
    read, mark = _access(uri, shm_root)
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            return read()
        for kind in marks.KINDS:
            with contextlib.suppress(FileNotFoundError):
                raise EngineError(f"{uri}: the hints were {kind}: {marks.reason_of(mark(kind))}", field=uri)
        if time.monotonic() >= deadline:
            raise EngineError(f"{uri}: no hints there after {timeout_s:g} s, and no mark that says why", field=uri)
        time.sleep(poll_s)


def read_shared(uri: str, *, timeout_s: float = 0.0, shm_root: Path = shared.ROOT) -> bytes:
    """`fetch` of a `shm://` URI. The hints stay until `release`, or until the engine needs the room."""
    _segment(uri, shm_root)
    return fetch(uri, timeout_s=timeout_s, shm_root=shm_root)


def release(uri: str, *, shm_root: Path = shared.ROOT) -> bool:
    """Frees the shared memory of hints that were read, and their marks; False when there was nothing."""
    path = _segment(uri, shm_root)
    found = False
    for old in (path, *(path.with_name(marks.file_name(path.stem, kind)) for kind in marks.KINDS)):
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
            found = True
    return found


def _segment(uri: str, root: Path) -> Path:
    run_id, slash, name = uri.removeprefix(_SHM).partition("/")
    if not uri.startswith(_SHM) or not slash:
        raise ConfigError(f"uri: got {uri!r}, expected shm://<run id>/<request id>", field="uri")
    return shared.directory_of(run_id, root) / (check_name(name) + shared.SUFFIX)


def _access(uri: str, root: Path) -> tuple[Callable[[], bytes], Callable[[marks.MarkKind], bytes]]:
    """How to read the hints, and how to read a mark of one kind; each raises FileNotFoundError where there is none."""
    if uri.startswith(_SHM):
        path = _segment(uri, root)
        return lambda: shared.read_segment(path), lambda kind: atomic.read(
            path.with_name(marks.file_name(path.stem, kind))
        )
    scheme, separator, rest = uri.partition("://")
    directory, _, file_name = rest.rpartition("/")
    name = check_name(file_name.removesuffix(SUFFIX))
    if not separator or not file_name.endswith(SUFFIX):
        raise ConfigError(f"uri: got {uri!r}, expected one from a receipt, ending in {SUFFIX}", field="uri")
    if scheme in LOCAL_SCHEMES:
        local = Path(directory)
        return lambda: atomic.read(local / file_name), lambda kind: atomic.read(local / marks.file_name(name, kind))
    from fsspec.core import url_to_fs

    file_system, remote = url_to_fs(f"{scheme}://{directory}")
    base = str(remote).rstrip("/")
    return (
        lambda: bytes(file_system.cat_file(f"{base}/{file_name}")),
        lambda kind: bytes(file_system.cat_file(f"{base}/{marks.file_name(name, kind)}")),
    )
