"""Signs of life and incident counters of the scheduler process, in a file both processes map.

The HTTP process reads them without asking the scheduler, so a health check never queues behind generation and a
frozen scheduler is seen as frozen.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import numpy as np

FILE_NAME = "telemetry.bin"
_FIELDS = (
    "heartbeat_ns",
    "nonfinite",
    "saturated",
    "underflow_blocks",
    "hint_files",
    "hint_failures",
    "hints_dropped",
    "hints_expired",
    "hints_queued",
    "hints_settled",
    "capture_mismatches",
    "weight_updates",
    "refit_session",
    "quarantined",
    "mixed_requests",
    "stale_requests",
    "stale_tokens",
)
INCIDENTS = ("nonfinite", "saturated", "underflow_blocks", "capture_mismatches")


class Telemetry:
    """Named 64-bit counters in a memory-mapped file; one writer, any number of readers.

    Raises:
        OSError: the file cannot be created or mapped.
    """

    def __init__(self, run_dir: str | Path, *, create: bool = False) -> None:
        path = Path(run_dir) / FILE_NAME
        size = 8 * len(_FIELDS)
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), size)
        self._values = np.frombuffer(self._map, dtype=np.int64)
        self._adding = threading.Lock()

    def beat(self) -> None:
        """Records that the scheduler is alive now."""
        self._values[0] = time.monotonic_ns()

    def add(self, name: str, count: int) -> None:
        """Adds to a counter; any thread of the writing process."""
        with self._adding:
            self._values[_FIELDS.index(name)] += count

    def put(self, name: str, value: int) -> None:
        """Sets a field that is a state, not a count."""
        self._values[_FIELDS.index(name)] = value

    def get(self, name: str) -> int:
        return int(self._values[_FIELDS.index(name)])

    @property
    def hints_pending(self) -> int:
        """Hints that were queued for a sink and are neither written nor lost yet."""
        return self.get("hints_queued") - self.get("hints_settled")

    def age_s(self) -> float | None:
        """Seconds since the last sign of life, or None before the first one. The clock is shared by all processes."""
        stamp = int(self._values[0])
        return None if stamp == 0 else (time.monotonic_ns() - stamp) / 1e9

    def incidents(self) -> dict[str, int]:
        return {name: self.get(name) for name in INCIDENTS}
