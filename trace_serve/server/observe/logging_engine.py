"""The engine's output as lines of the server's own log, for engines that are given no file of their own."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import structlog

from trace_serve.server.engines.supervisor import EngineLike
from trace_serve.server.observe import logging_setup

log = structlog.get_logger("trace_serve.engine")

MAX_LINE = 8192
_POLL_S = 0.2
_PREFIX = re.compile(r"^\[[0-9-]{10} [0-9:]{8}(?:\.\d+)?(?: [A-Z0-9 ]+)?\] ")
_PROGRESS = re.compile(r"\d+%.*\|.*\d+/\d+ \[")
"""Progress bars, which are rewritten in place and make no lines."""


class LoggingEngine(EngineLike, Protocol):
    """An engine that writes to a file."""

    @property
    def log_path(self) -> Path: ...


class FollowedEngine:
    """An engine whose output is passed on, line by line, until it has stopped.

    Args:
        engine: unstarted; its log file appears when it is started.
    """

    def __init__(self, engine: LoggingEngine) -> None:
        self._engine = engine
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def api_key(self) -> str:
        return self._engine.api_key

    @property
    def served_name(self) -> str:
        return self._engine.served_name

    def start(self) -> None:
        logging_setup.hide(self._engine.api_key)
        self._engine.start()
        path = self._engine.log_path
        self._thread = threading.Thread(target=self._follow, args=(path,), name="engine-log", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> object:
        return self._engine.wait_ready(timeout_s)

    def poll(self) -> int | None:
        return self._engine.poll()

    def stop(self, timeout_s: float) -> None:
        self._engine.stop(timeout_s)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5 * _POLL_S)
        logging_setup.forget(self._engine.api_key)

    def _follow(self, path: Path) -> None:
        severity = "info"
        for line in _lines(path, self._stopped):
            severity = severity_of(line, severity)
            getattr(log, severity)(_PREFIX.sub("", line)[:MAX_LINE])


def severity_of(line: str, previous: str) -> str:
    """How bad a line of SGLang's is: it writes no levels, so this goes by its words.

    Args:
        line: without its line break.
        previous: of the line before, which a traceback's indented lines share.
    """
    if line[:1].isspace():
        return previous
    if re.search(r"\b(?:CRITICAL|ERROR|Traceback|[A-Za-z]*(?:Error|Exception))\b", line):
        return "error"
    if re.search(r"\b(?:WARNING|Warning|[A-Za-z]+Warning|warn)\b", line):
        return "warning"
    return "info"


def _lines(path: Path, stopped: threading.Event) -> Iterator[str]:
    """Lines of a growing file, as they become whole; ends once `stopped` is set and nothing more comes."""
    pending = b""
    # Opened once: the engine's directory, and the file with it, is removed when the engine stops.
    with path.open("rb") as file:
        while True:
            ending = stopped.is_set()
            chunk = file.read(1 << 16)
            if chunk:
                *whole, pending = (pending + chunk).split(b"\n")
                pending = pending[-4 * MAX_LINE :]
                yield from filter(None, map(_readable, whole))
            elif ending:
                break
            else:
                stopped.wait(_POLL_S)
    if rest := _readable(pending):
        yield rest


def _readable(raw: bytes) -> str:
    """A line as it would stand on a terminal: of what was rewritten in place only the end."""
    line = raw.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1].rstrip()
    return "" if _PROGRESS.search(line) else line
