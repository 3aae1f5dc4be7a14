"""Runs one importer and writes its query file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval_gate.arms.records import write_atomic
from eval_gate.importers.records import CHECKERS, Imported, ImportOptions, UnsupportedRecordError
from eval_gate.queries import Query, canonical, validation_message
from trace_serve.errors import ConfigError, QueryError

Reader = Callable[[Path, ImportOptions], Iterator[Imported]]

FORMATS = {
    "openai-batch": "eval_gate.importers.openai_batch",
    "openai-evals": "eval_gate.importers.openai_evals",
    "promptfoo": "eval_gate.importers.promptfoo",
    "inspect": "eval_gate.importers.inspect",
    "sgl-eval": "eval_gate.importers.sgl_eval",
    "reasoning-gym": "eval_gate.importers.reasoning_gym",
    "request-log": "eval_gate.importers.request_log",
    "sglang-dump": "eval_gate.importers.sglang_dump",
}
"""Formats, and the module with the `read` function of each."""


@dataclass(frozen=True)
class Conversion:
    """What came of a conversion; `skipped` has one line for each record that was left out on request."""

    written: int
    skipped: tuple[str, ...]


def convert(
    name: str, source: Path, out: Path, options: ImportOptions | None = None, *, skip_unsupported: bool = False
) -> Conversion:
    """Reads `source` in the named format and writes the query file `out`, whole or not at all.

    Args:
        skip_unsupported: leave out records that have no counterpart among queries, and say which.

    Raises:
        ConfigError: no such format, or `out` cannot be written.
        QueryError: a record is faulty or has no counterpart; the message names file and line.
    """
    options = options or ImportOptions()
    if name not in FORMATS:
        raise ConfigError(f"--from {name!r}: no such format, expected one of {', '.join(FORMATS)}", field="from")
    if options.checker is not None and options.checker not in CHECKERS:
        raise ConfigError(
            f"--checker {options.checker!r}: not among {', '.join(CHECKERS)}; write other checkers into the query file",
            field="checker",
        )
    read: Reader = importlib.import_module(FORMATS[name]).read
    skipped: list[str] = []
    queries: list[Query] = []
    places: dict[str, str] = {}
    for imported in _records(read(source, options), skipped if skip_unsupported else None):
        query = validated(imported, options)
        if query.id in places:
            raise QueryError(f"{imported.place}: id {query.id!r} is already used at {places[query.id]}", field="id")
        places[query.id] = imported.place
        queries.append(query)
    if not queries:
        raise QueryError(f"{source}: no queries in it ({len(skipped)} skipped)", field="in")
    try:
        write_atomic(out, canonical(queries))
    except OSError as exc:
        raise ConfigError(f"{out}: cannot be written: {exc.strerror}", field="out") from exc
    return Conversion(len(queries), tuple(skipped))


def _records(read: Iterator[Imported], skipped: list[str] | None) -> Iterator[Imported]:
    for imported in read:
        fault = imported.record.get("unsupported")
        if fault is None:
            yield imported
        elif skipped is None:
            raise UnsupportedRecordError(f"{fault}; --skip-unsupported leaves such records out", field="in")
        else:
            skipped.append(str(fault))


def each(records: Iterator[tuple[str, Any]], build: Callable[[str, Any], dict[str, Any]]) -> Iterator[Imported]:
    """Builds a query record from each source record; one without a counterpart is passed on as such."""
    for place, raw in records:
        try:
            yield Imported(place, build(place, raw))
        except UnsupportedRecordError as exc:
            yield Imported(place, {"unsupported": str(exc)})


def validated(imported: Imported, options: ImportOptions) -> Query:
    """The query of an imported record.

    Raises:
        QueryError: it is none; the message names its place.
    """
    record = {key: value for key, value in imported.record.items() if value is not None}
    if options.suite is not None:
        record["suite"] = options.suite
    try:
        return Query.model_validate(record)
    except ValidationError as exc:
        raise QueryError(f"{imported.place}: {validation_message(exc)}", field="in") from exc
