"""The bounded queue between the scheduler, which never waits, and the places that hints go to."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trace_serve.errors import ConfigError
from trace_serve.hints.sinks import janitor, shared
from trace_serve.hints.sinks.lane import Lane
from trace_serve.hints.sinks.marks import MarkKind
from trace_serve.hints.sinks.target import SUFFIX, AllowedTargets, Target, check_name
from trace_serve.hints.sinks.writers import Writer, open_writer

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.5, 2.0, 8.0)
"""Pauses before a URL is tried again; after the last one the hints have failed."""
SHM_MAX_BYTES = 1 << 30
JANITOR_EVERY_S = 30.0


@dataclass(frozen=True)
class Job:
    """One request's hints.

    Attributes:
        name: the request id, which becomes the file's stem.
        target: where they go.
        encode: gives the file's bytes; called once, in the writer's thread.
        size_hint: bytes that the job keeps alive until it is written.
    """

    name: str
    target: Target
    encode: Callable[[], bytes]
    size_hint: int


@dataclass(frozen=True)
class Receipt:
    """Attributes:
    status: `queued` promises an attempt, not success; what became of it is at `uri`: the hints, or a mark.
    uri: where the hints will be, for `fetch`.
    reason: which bound was in the way; empty where queued.
    """

    status: Literal["queued", "dropped"]
    uri: str
    reason: str = ""


@dataclass(frozen=True)
class SinkEvent:
    """Attributes:
    kind: `written`, `failed` (not writable), `dropped` (no room in the queue), `expired` (removed unread) or `retried`.
    name: the request id; empty for files expired from a directory, which are counted together.
    uri: where; empty with `name`.
    count: hints that this is about.
    bytes: bytes written, or freed.
    reason: why, for what went wrong.
    """

    kind: Literal["written", "failed", "dropped", "expired", "retried"]
    name: str
    uri: str
    count: int = 1
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class SinkStats:
    """Counts since the queue was made, and what is pending now.

    `queued + dropped` is every job submitted; `written + failed + pending_items` is every job queued, except what
    `close` gave up, which is in `dropped` too.
    """

    queued: int = 0
    written: int = 0
    failed: int = 0
    dropped: int = 0
    expired: int = 0
    retried: int = 0
    bytes_written: int = 0
    pending_items: int = 0
    pending_bytes: int = 0


@dataclass
class _Task:
    job: Job
    uri: str
    payload: bytes | None = None
    attempts: int = 0


class SinkQueue:
    """Takes jobs without waiting and writes them behind the caller's back.

    Local places (directories, shared memory) and remote ones (URLs) have a thread each, so that a URL that hangs never
    delays a file; the bounds hold for each of the two. Threads and shared memory are made with the first job, in the
    process that submits it, so the queue may be made before a fork.

    Args:
        allowed: what the operator allows.
        max_items: jobs that are not finished.
        max_bytes: their size hints together.
        on_event: called once for each outcome, `dropped` in the submitting thread and the others in a writer's, never
            twice at once; has to be quick. What it raises is logged.
        run_id: names the engine in `shm://` URIs; None takes a random one.
        shm_max_bytes: all hints in shared memory together.
        shm_root: where shared memory is mounted.
        ttl_s: hint files older than this are removed; None keeps them.
        dir_max_bytes: hint files of the hint directory together, the oldest go first; None does not limit them.
        janitor_every_s: pause between two looks for such files.
        back_off_s: pauses before a URL is tried again.
    """

    def __init__(
        self,
        allowed: AllowedTargets,
        *,
        max_items: int,
        max_bytes: int,
        on_event: Callable[[SinkEvent], None],
        run_id: str | None = None,
        shm_max_bytes: int = SHM_MAX_BYTES,
        shm_root: Path = shared.ROOT,
        ttl_s: float | None = None,
        dir_max_bytes: int | None = None,
        janitor_every_s: float = JANITOR_EVERY_S,
        back_off_s: tuple[float, ...] = BACK_OFF_S,
    ) -> None:
        self._allowed = allowed
        self._on_event = on_event
        self._run_id = check_name(run_id or secrets.token_hex(8))
        self._shm_max_bytes = shm_max_bytes
        self._shm_root = shm_root
        self._ttl_s = ttl_s
        self._dir_max_bytes = dir_max_bytes
        self._back_off_s = back_off_s
        cleans = allowed.hint_dir is not None and (ttl_s is not None or dir_max_bytes is not None)
        self._local: Lane[_Task] = Lane(
            "hint-sinks-local",
            self._write,
            max_items=max_items,
            max_bytes=max_bytes,
            idle=self._clean if cleans else None,
            idle_every_s=janitor_every_s,
        )
        self._remote: Lane[_Task] = Lane("hint-sinks-remote", self._write, max_items=max_items, max_bytes=max_bytes)
        self._counting, self._telling = threading.Lock(), threading.Lock()
        self._counts = SinkStats()
        self._space: shared.SharedSpace | None = None
        _reset_after_fork(self)

    def _after_fork(self) -> None:
        """In a forked child: threads, jobs and shared memory are the parent's, and any lock may be held for ever."""
        self._counting, self._telling = threading.Lock(), threading.Lock()
        self._counts = SinkStats()
        if self._space is not None:
            self._space = None
            self._run_id = secrets.token_hex(8)
        for lane in (self._local, self._remote):
            lane.after_fork()

    def uri(self, target: Target, name: str) -> str:
        """Where the hints of a request go.

        Raises:
            ConfigError: the target is not allowed or is `inline`, or the name could not be that of a file.
        """
        self._allowed.check(target)
        check_name(name)
        if target.kind == "inline":
            raise ConfigError("inline hints travel in the answer and have no sink", field="trace_hints.sink")
        if target.kind == "shm":
            return f"shm://{self._run_id}/{name}"
        base = target.url or f"file://{self._allowed.directory(target).resolve()}"
        return f"{base}{'' if base.endswith('/') else '/'}{name}{SUFFIX}"

    def submit(self, job: Job) -> Receipt:
        """Queues a job, or drops it where a bound is in the way; waits for nothing in either case.

        Raises:
            ConfigError: as `uri`; nothing was queued.
        """
        uri = self.uri(job.target, job.name)
        lane = self._remote if job.target.remote else self._local
        reason = lane.put(_Task(job, uri), job.size_hint)
        if reason is None:
            self._count("queued", 1)
            return Receipt("queued", uri)
        lane.note(functools.partial(self._mark, job, "dropped", reason))
        self._report(SinkEvent("dropped", job.name, uri, reason=reason))
        return Receipt("dropped", uri, reason)

    def drain(self, timeout_s: float) -> int:
        """Waits until every job is written or failed, or the time is over; returns how many are not."""
        left = self._local.drain(timeout_s)
        return left + self._remote.drain(timeout_s if not left else 0.0)

    def close(self, timeout_s: float = 0.0) -> int:
        """Accepts no more, waits as `drain`, drops the rest, and removes this engine's shared memory.

        Returns:
            How many jobs were dropped; those of local places leave a mark.
        """
        dropped = 0
        for lane in (self._local, self._remote):
            tasks, notes = lane.close(timeout_s)
            for note in notes if lane is self._local else ():
                note()
            for task in tasks:
                dropped += 1
                reason = "the engine stopped"
                if lane is self._local:
                    self._mark(task.job, "dropped", reason)
                self._report(SinkEvent("dropped", task.job.name, task.uri, reason=reason))
        if self._space is not None:
            self._space.close()
        return dropped

    def stats(self) -> SinkStats:
        items, size = (a + b for a, b in zip(self._local.pending(), self._remote.pending(), strict=True))
        with self._counting:
            return replace(self._counts, pending_items=items, pending_bytes=size)

    def _write(self, task: _Task) -> float | None:
        job = task.job
        retries = False
        try:
            if task.payload is None:
                task.payload = job.encode()
            writer = self._writer(job.target)
            retries = writer.retries
            writer.write(job.name, task.payload)
        except Exception as exc:
            # Whatever an encoder or a file system raises: the answer is sound and the next hints may be.
            reason = f"{type(exc).__name__}: {exc}"
            if retries and task.attempts < len(self._back_off_s):
                task.attempts += 1
                self._report(SinkEvent("retried", job.name, task.uri, reason=reason))
                return self._back_off_s[task.attempts - 1]
            logger.warning("hints of request %s are lost: %s", job.name, reason)
            self._mark(job, "failed", reason)
            self._report(SinkEvent("failed", job.name, task.uri, reason=reason))
            return None
        self._report(SinkEvent("written", job.name, task.uri, bytes=len(task.payload)))
        return None

    def _mark(self, job: Job, kind: MarkKind, reason: str) -> None:
        try:
            self._writer(job.target).mark(job.name, kind, reason)
        except Exception as exc:
            # The counters tell; where the hints cannot be written, a mark often cannot either.
            logger.warning("no mark for the %s hints of request %s: %s", kind, job.name, exc)

    def _writer(self, target: Target) -> Writer:
        if target.kind != "shm":
            return open_writer(self._allowed, target)
        if self._space is None:
            shared.remove_stale(self._shm_root)
            self._space = shared.SharedSpace(self._run_id, self._shm_max_bytes, self._shm_expired, root=self._shm_root)
        return self._space

    def _shm_expired(self, name: str, size: int) -> None:
        uri = f"shm://{self._run_id}/{name}"
        self._report(SinkEvent("expired", name, uri, bytes=size, reason="shared memory was needed for newer hints"))

    def _clean(self) -> None:
        directory = self._allowed.hint_dir
        if directory is not None:
            gone = janitor.expire(directory, older_than_s=self._ttl_s, max_bytes=self._dir_max_bytes)
            if gone.files:
                self._report(SinkEvent("expired", "", "", count=gone.files, bytes=gone.bytes, reason="age or size"))

    def _report(self, event: SinkEvent) -> None:
        self._count(event.kind, event.count)
        if event.kind == "written":
            self._count("bytes_written", event.bytes)
        try:
            with self._telling:
                self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %s", event)

    def _count(self, name: str, by: int) -> None:
        with self._counting:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + by})


def _reset_after_fork(queue: SinkQueue) -> None:
    reference = weakref.ref(queue)

    def reset() -> None:
        alive = reference()
        if alive is not None:
            alive._after_fork()

    os.register_at_fork(after_in_child=reset)
