"""The optional request log: a sampled, redacted record of what was asked and answered, for the gate to replay.

The event loop hands over bytes and never waits; one thread parses, redacts and writes. What does not fit into its queue
is dropped and counted.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog

from trace_serve.errors import ConfigError
from trace_serve.server.observe.request_log_file import LogFile
from trace_serve.server.observe.request_log_record import Exchange, RecordError, TooLargeError, encode
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.request_log")

NO_REDACTION = "none"
MAX_QUEUED_BYTES = 64 << 20
_WARN_EVERY_S = 30.0

Result = Literal["written", "dropped", "too_large", "failed"]


class RequestLog:
    """Owns the file and the thread.

    Args:
        file: where lines go.
        share: of conversations (or of requests that name none) that are recorded, above 0 and at most 1.
        redactor: name and version of `apply`; None when texts are written as they are.
        apply: text to redacted text; called in the thread.
        max_queued: records that may wait.
        count: told what became of each record; called from either thread.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        file: LogFile,
        *,
        share: float,
        redactor: str | None,
        apply: Callable[[str], str] | None,
        max_queued: int,
        count: Callable[[Result], None],
    ) -> None:
        self._file = file
        self._share = share
        self._redactor = redactor
        self._apply = apply
        self._max_queued = max_queued
        self._count = count
        self._waiting: deque[Exchange] = deque()
        self._bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._warned_at = 0.0
        removed = file.open()
        if removed:
            log.warning("request_log_repaired", removed_bytes=removed)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def wants(self, request_id: str, conversation: str | None) -> bool:
        """Whether a request belongs to the share; all requests of one conversation do, or none."""
        if self._share >= 1.0:
            return True
        digest = hashlib.sha256((conversation or request_id).encode()).digest()
        return int.from_bytes(digest[:8], "big") < self._share * 2.0**64

    def submit(self, exchange: Exchange) -> None:
        """Queues a record, or drops it when the queue is full; never waits for the disk or the redactor."""
        size = exchange.size
        with self._changed:
            full = len(self._waiting) >= self._max_queued or self._bytes + size > MAX_QUEUED_BYTES
            if not (full or self._closing):
                self._waiting.append(exchange)
                self._bytes += size
                self._changed.notify()
                return
        self._count("dropped")

    def pass_over(self) -> None:
        """Counts a record whose answer was too large to be kept."""
        self._count("too_large")

    def close(self, timeout_s: float) -> None:
        """Writes what waits, for at most `timeout_s`, drops the rest, and closes the file. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            left, self._bytes = len(self._waiting), 0
            self._waiting.clear()
        for _ in range(left):
            self._count("dropped")
        if self._thread.is_alive():
            log.warning("request_log_cut", dropped=left)

    def _run(self) -> None:
        try:
            while (exchange := self._next()) is not None:
                self._count(self._write(exchange))
        finally:
            self._file.close()

    def _next(self) -> Exchange | None:
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait()
            exchange = self._waiting.popleft()
            self._bytes -= exchange.size
            return exchange

    def _write(self, exchange: Exchange) -> Result:
        try:
            self._file.append(encode(exchange, self._redactor, self._apply))
        except TooLargeError as exc:
            self._warn(exchange.id, str(exc))
            return "too_large"
        except (RecordError, OSError, ConfigError) as exc:
            self._warn(exchange.id, str(exc))
            return "failed"
        except Exception as exc:
            # One record that nobody foresaw must not end the log of all that follow; its words could hold a text.
            self._warn(exchange.id, type(exc).__name__)
            return "failed"
        return "written"

    def _warn(self, request_id: str, reason: str) -> None:
        """A disk that is full would otherwise fill the log as well; the counters tell how many there were."""
        now = time.monotonic()
        if not self._warned_at or now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            log.warning("request_not_logged", request_id=request_id, reason=reason)


def open_request_log(settings: Settings, count: Callable[[Result], None]) -> RequestLog | None:
    """The request log that the settings ask for; None when they ask for none.

    Raises:
        ConfigError: the file cannot be written, no redaction was chosen, or the chosen one cannot be loaded.
    """
    path = settings.request_log
    if path is None:
        return None
    return open_log(path, settings, count)


def open_log(path: Path, settings: Settings, count: Callable[[Result], None]) -> RequestLog:
    """A request log at `path`, redacted and rotated as the settings say.

    Raises:
        ConfigError: see `open_request_log`.
    """
    redactor, apply = _load_redactor(settings.request_log_redact)
    return RequestLog(
        LogFile(path, max_bytes=settings.request_log_max_bytes, files=settings.request_log_files),
        share=settings.request_log_share,
        redactor=redactor,
        apply=apply,
        max_queued=settings.request_log_queue,
        count=count,
    )


def _load_redactor(spec: str | None) -> tuple[str | None, Callable[[str], str] | None]:
    if spec is None:
        raise ConfigError(
            "--request-log: prompts and answers would be written; say how they are redacted with --request-log-redact "
            f"presidio or module:function, or `{NO_REDACTION}` to write them as they are",
            field="request_log_redact",
        )
    if spec == NO_REDACTION:
        return None, None
    # The gate's own hook, so that a log and a gate run that redact alike say so in the same words. Imported only here:
    # it brings the gate's query format with it.
    from eval_gate.redaction import load_redactor

    try:
        loaded = load_redactor(spec)
    except ConfigError as exc:
        message = str(exc).replace("--redact", "--request-log-redact", 1)
        raise ConfigError(message, field="request_log_redact") from exc
    return loaded.name, loaded.apply
