"""Signs of life and incident counters of the scheduler processes, in a file that they and the HTTP process map.

The HTTP process reads them without asking the scheduler, so a health check never queues behind generation and a
frozen scheduler is seen as frozen.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE_NAME = "telemetry.bin"
_FIELDS = (
    "heartbeat_ns",
    "nonfinite",
    "saturated",
    "underflow_blocks",
    "hint_files",
    "hint_bytes",
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
_SUMMED = ("nonfinite", "saturated", "underflow_blocks")
"""What each rank counts of its own slices; everything else is counted by one of them, or by all alike."""


class Telemetry:
    """Named 64-bit counters in a memory-mapped file, a lane a rank; one writer a lane, any number of readers.

    Args:
        run_dir: directory of the file.
        create: whether to make the file, for `ranks` lanes; else it is there.
        ranks: scheduler processes of one model.

    Attributes:
        lane: the rank that this process writes as.

    Raises:
        OSError: the file cannot be created or mapped.
    """

    def __init__(self, run_dir: str | Path, *, create: bool = False, ranks: int = 1) -> None:
        path = Path(run_dir) / FILE_NAME
        if create:
            path.write_bytes(bytes(8 * len(_FIELDS) * ranks))
        with path.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), 0)
        self._lanes = np.frombuffer(self._map, dtype=np.int64).reshape(-1, len(_FIELDS))
        self.lane = 0
        self._adding = threading.Lock()

    @property
    def ranks(self) -> int:
        """Lanes of the file."""
        return int(self._lanes.shape[0])

    @property
    def _values(self) -> NDArray[np.int64]:
        mine: NDArray[np.int64] = self._lanes[self.lane]
        return mine

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
        """A counter over all ranks: summed where each counts its own slices, else the largest."""
        found = self._lanes[:, _FIELDS.index(name)]
        return int(found.sum() if name in _SUMMED else found.max())

    @property
    def hints_pending(self) -> int:
        """Hints that were queued for a sink and are neither written nor lost yet."""
        return self.get("hints_queued") - self.get("hints_settled")

    def age_s(self) -> float | None:
        """Seconds since the last sign of life of the rank that was silent longest, or None before the first of each.

        The clock is shared by all processes.
        """
        stamp = int(self._lanes[:, 0].min())
        return None if stamp == 0 else (time.monotonic_ns() - stamp) / 1e9

    def incidents(self) -> dict[str, int]:
        return {name: self.get(name) for name in INCIDENTS}
