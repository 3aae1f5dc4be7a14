"""A queue that remembers its events, and fsspec file systems that are slow or break on demand."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from trace_serve.hints.sinks import AllowedTargets, Job, SinkEvent, SinkQueue, parse_target

WAIT_S = 30.0
"""A guard against a test that would hang; nothing is measured with it."""


class Recorder:
    """Collects events; `counts` sums them by kind."""

    def __init__(self) -> None:
        self.events: list[SinkEvent] = []

    def __call__(self, event: SinkEvent) -> None:
        self.events.append(event)

    @property
    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for event in self.events:
            found[event.kind] += event.count
        return found


def make_queue(
    hint_dir: Path | None = None,
    *prefixes: str,
    recorder: Callable[[SinkEvent], None] | None = None,
    shm_root: Path | None = None,
    **options: Any,
) -> SinkQueue:
    allowed = AllowedTargets(hint_dir=hint_dir, url_prefixes=prefixes, shm=shm_root is not None)
    fields: dict[str, Any] = {"max_items": 1000, "max_bytes": 1 << 20, "back_off_s": (0.0, 0.0), **options}
    if shm_root is not None:
        fields["shm_root"] = shm_root
    return SinkQueue(allowed, on_event=recorder or Recorder(), **fields)


def make_job(name: str, target: str, encode: Callable[[], bytes] | bytes = b"hints", size: int = 10) -> Job:
    made = (lambda: encode) if isinstance(encode, bytes) else encode
    return Job(name, parse_target(target), made, size)


class SlowFileSystem(MemoryFileSystem):
    """Writes wait until the test says go."""

    protocol = ("slow",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    go = threading.Event()
    started = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("slow://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        type(self).started.set()
        assert type(self).go.wait(WAIT_S)
        super().pipe_file(path, value, mode, **kwargs)


class FullFileSystem(MemoryFileSystem):
    """Has no room for the first `failures` hint files; room for marks it has."""

    protocol = ("full",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures = 0
    attempts = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("full://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        kind = type(self)
        if ".safetensors." in path:
            kind.attempts += 1
            if kind.attempts <= kind.failures:
                # As a real one does: a part is there before the error.
                super().pipe_file(path, value[: len(value) // 2], mode, **kwargs)
                raise OSError(errno.ENOSPC, "No space left on device")
        super().pipe_file(path, value, mode, **kwargs)


for file_system in (SlowFileSystem, FullFileSystem):
    fsspec.register_implementation(file_system.protocol[0], file_system, clobber=True)
