"""Refuses bodies nested so deeply that a later recursive pass, here or in the engine, could run out of stack."""

from __future__ import annotations

from typing import Any

from trace_serve.server.errors import bad_request

MAX_DEPTH = 64
"""Levels of arrays and objects; a JSON schema of an API seldom has twenty."""


def check_depth(body: bytes, parsed: Any, limit: int = MAX_DEPTH) -> None:
    """Checks a parsed body without recursion.

    Args:
        body: the bytes it was parsed from: where they open few brackets, nothing else has to be looked at.
        parsed: the value.
        limit: most levels of nesting.

    Raises:
        ApiError: 400.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    level: list[Any] = [parsed]
    for _ in range(limit):
        level = [
            child
            for value in level
            for child in (value.values() if type(value) is dict else value)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise bad_request(f"body: nested more than {limit} levels deep; send a flatter one", code="nested_too_deep")
