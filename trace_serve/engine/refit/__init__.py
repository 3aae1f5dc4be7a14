"""Weight updates while serving: checking them, loading them, and saying which version computed what.

`core.Refit` is the scheduler's side, `front` the HTTP process's; `hooks.refit` ties both to SGLang.
"""

from __future__ import annotations

from typing import Any

from trace_serve.engine.refit.versions import Spans


def spans(slot_versions: Any) -> Spans:
    """(first, end, label) of consecutive rows of one weight version.

    Args:
        slot_versions: int [T], the weight counter that each row's KV slot was written under.
    """
    from trace_serve.engine import state

    engine = state.get()
    if engine.refit is None:
        return ((0, len(slot_versions), "default"),) if len(slot_versions) else ()
    return engine.refit.versions.spans(slot_versions)


__all__ = ["Spans", "spans"]
