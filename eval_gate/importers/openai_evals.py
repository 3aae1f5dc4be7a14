"""Samples of OpenAI's evals: lines with `input` (messages or a text) and `ideal` (one answer or several).

https://github.com/openai/evals. Its basic `Match` asks that the answer starts with an ideal one: the checker `prefix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.importers.conversion import each
from eval_gate.importers.records import Imported, ImportOptions, checker, json_lines, messages
from trace_serve.errors import QueryError


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a line; the id is the record's own, else file name and line."""

    def build(place: str, raw: dict[str, Any]) -> dict[str, Any]:
        if "input" not in raw or "ideal" not in raw:
            raise QueryError(f"{place}: expected input and ideal", field="input")
        given = raw["input"]
        prompt: dict[str, Any] = {"prompt": given} if isinstance(given, str) else {"messages": messages(given, place)}
        name = raw.get("id") or raw.get("sample_id") or f"{path.stem}:{place.rpartition(':')[2]}"
        return {
            "id": str(name),
            **prompt,
            "max_tokens": options.max_tokens,
            "checker": checker(options.checker or "prefix", raw["ideal"], place),
        }

    return each(json_lines(path), build)
