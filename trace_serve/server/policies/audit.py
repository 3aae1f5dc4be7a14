"""The audit log: one JSON object a line, appended only, each line bound to the one before it by its digest.

A line that was edited, removed or put in between breaks the chain. Lines cut off at the end do not, so the digest of
the last line (`head`) is in the log of the server and in the admin API: keep one outside to be able to tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError

START = "sha256:" + "0" * 64
"""What the first line has as `previous`."""
TORN = "torn_line"
"""Event that follows a line which a crash left unfinished."""


@dataclass(frozen=True)
class Chain:
    """A verified audit log.

    Attributes:
        lines: how many.
        head: digest of the last one; `START` when there is none.
    """

    lines: int
    head: str


class AuditLog:
    """Appends events, each synced to the disk before `append` returns; safe to use from several threads.

    Args:
        path: created if it is missing, with mode 0600.

    Raises:
        ConfigError: the file cannot be written, or its chain is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be opened ({exc.strerror})", field="audit_log") from exc
        torn = _torn_end(path)
        if torn is None:
            chain = verify(path)
            self._lines, self._head = chain.lines, chain.head
        else:
            whole = verify(path, ignore_end=len(torn))
            self._lines, self._head = whole.lines, _digest(torn)
            os.write(self._file, b"\n")
            self.append(TORN, actor="trace-serve", bytes=len(torn))

    @property
    def head(self) -> str:
        return self._head

    def append(self, event: str, *, actor: str, **details: Any) -> dict[str, Any]:
        """Writes one event.

        Args:
            event: what happened, for example `activate`.
            actor: who asked for it.
            details: JSON values.

        Returns:
            The line as an object.
        """
        with self._lock:
            entry = {
                "seq": self._lines,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "event": event,
                "actor": actor,
                **details,
                "previous": self._head,
            }
            line = json.dumps(entry, separators=(",", ":")).encode()
            os.write(self._file, line + b"\n")
            os.fsync(self._file)
            self._lines += 1
            self._head = _digest(line)
        return entry

    def tail(self, count: int) -> list[dict[str, Any]]:
        """The last events, oldest first."""
        lines = self.path.read_bytes().splitlines()[-count:] if count > 0 else []
        return [parsed for line in lines if (parsed := _parse(line)) is not None]

    def close(self) -> None:
        os.close(self._file)


def verify(path: Path, *, ignore_end: int = 0) -> Chain:
    """Checks every line of an audit log.

    Args:
        path: the log.
        ignore_end: bytes at the end that are no whole line.

    Raises:
        ConfigError: the first line that is not bound to the one before it, by number.
    """
    count, head, torn = 0, START, False
    for number, line in enumerate(_lines(path, ignore_end), start=1):
        entry = _parse(line)
        if entry is None:
            if torn:
                raise ConfigError(f"{path}:{number}: not a JSON object; the log was edited", field="audit_log")
            torn = True
        else:
            expected = "an unfinished line is followed by its own event" if torn else "lines are bound to each other"
            whole = entry.get("previous") == head and entry.get("seq") == count
            if not whole or (torn and entry.get("event") != TORN):
                found = f"previous {entry.get('previous')!r}, seq {entry.get('seq')!r}"
                raise ConfigError(
                    f"{path}:{number}: {found}, expected {head!r}, {count} ({expected}); a line was edited, removed or "
                    "inserted",
                    field="audit_log",
                )
            torn = False
            count += 1
        head = _digest(line)
    if torn:
        raise ConfigError(f"{path}: ends in a line that is not a JSON object", field="audit_log")
    return Chain(count, head)


def _lines(path: Path, ignore_end: int) -> Iterator[bytes]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror})", field="audit_log") from exc
    whole = data[: len(data) - ignore_end]
    if whole and not whole.endswith(b"\n"):
        raise ConfigError(f"{path}: ends in the middle of a line", field="audit_log")
    yield from whole.split(b"\n")[:-1]


def _torn_end(path: Path) -> bytes | None:
    """What a crash left of a line at the end of the file."""
    data = path.read_bytes()
    end = data[data.rfind(b"\n") + 1 :]
    return end or None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _digest(line: bytes) -> str:
    return "sha256:" + hashlib.sha256(line).hexdigest()
