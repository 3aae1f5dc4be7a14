"""OpenAI batch input files: lines with `custom_id`, `url` and `body`.

https://platform.openai.com/docs/guides/batch. They carry no expected answers.
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
)
from trace_serve.errors import QueryError

_ROUTES = ("/v1/chat/completions", "/v1/completions")


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a line; the id is `custom_id`."""

    def build(place: str, raw: dict[str, Any]) -> dict[str, Any]:
        name = raw.get("custom_id")
        if not isinstance(name, str) or not name:
            raise QueryError(f"{place}: custom_id: expected a text", field="custom_id")
        if raw.get("url") not in _ROUTES:
            raise UnsupportedRecordError(
                f"{place}: url {raw.get('url')!r} is not among {', '.join(_ROUTES)}", field="url"
            )
        request = from_request(raw.get("body"), place, options)
        expected = options.expected(name, None, place)
        return {"id": name, **request, "checker": checker(options.checker or "normalized", expected, place)}

    return each(json_lines(path), build)
