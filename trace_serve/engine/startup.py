"""Where an engine's start-up time goes: seconds between named moments, from the start of its process."""

from __future__ import annotations

import itertools
import time
from typing import Any

_moments: list[tuple[str, float]] = []


def _process_age_s() -> float:
    import psutil

    return time.time() - float(psutil.Process().create_time())


def mark(phase: str) -> None:
    """Ends a phase now; the first one began with the process. A forked child goes on with its parent's moments."""
    if not _moments:
        _moments.append(("", time.monotonic() - _process_age_s()))
    _moments.append((phase, time.monotonic()))


def phases() -> dict[str, float]:
    """Seconds each phase took, in their order."""
    return {name: end - begin for (_, begin), (name, end) in itertools.pairwise(_moments)}


def of_scheduler(scheduler: Any) -> dict[str, Any]:
    """The phases until this scheduler was ready, and the parts of its own that SGLang measured."""
    mark("scheduler")
    measured = getattr(scheduler, "startup_time", None) or {}
    parts = {name: value for name, value in measured.items() if isinstance(value, int | float)}
    return {"total_s": sum(phases().values()), "phases_s": phases(), "scheduler_s": parts}
