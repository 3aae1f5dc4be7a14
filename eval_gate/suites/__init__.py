"""The query sets that ship with the gate, and the generator that wrote them (`generate`). No checkers here."""

from __future__ import annotations

from pathlib import Path

from trace_serve.errors import QueryError

NAMES = ("support", "support-dev")


def path(name: str) -> Path:
    """Path of a shipped query set.

    Raises:
        QueryError: no set has that name.
    """
    if name not in NAMES:
        raise QueryError(f"--queries {name!r}: no such suite, expected one of {', '.join(NAMES)}", field="queries")
    return Path(__file__).parent / f"{name}.jsonl"
