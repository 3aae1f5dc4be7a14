"""The request log of the trace-serve front-end, version 1: one JSON object a line.

`{"schema_version": 1, "id": "...", "route": "/v1/chat/completions", "status": 200, "conversation": "..." or null,
"request": {...}, "response": {...} or null}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.importers.conversion import each
from eval_gate.importers.records import (
    Imported,
    ImportOptions,
    UnsupportedRecordError,
    checker,
    from_request,
    json_lines,
    response_text,
)
from trace_serve.errors import QueryError

SCHEMA_VERSION = 1


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a request that was answered; `conversation` becomes the cluster key."""

    def build(place: str, raw: dict[str, Any]) -> dict[str, Any]:
        if raw.get("schema_version") != SCHEMA_VERSION:
            raise QueryError(
                f"{place}: schema_version {raw.get('schema_version')!r}, expected {SCHEMA_VERSION}",
                field="schema_version",
            )
        name = raw.get("id")
        if not isinstance(name, str) or not name:
            raise QueryError(f"{place}: id: expected a text", field="id")
        if raw.get("status") != 200:
            raise UnsupportedRecordError(f"{place}: was answered with status {raw.get('status')!r}", field="status")
        request = from_request(raw.get("request"), place, options)
        expected = options.expected(name, response_text(raw.get("response")), place)
        return {
            "id": name,
            **request,
            "cluster": raw.get("conversation"),
            "checker": checker(options.checker or "normalized", expected, place),
        }

    return each(json_lines(path), build)
