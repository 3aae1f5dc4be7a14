"""Inspect (UK AISI): datasets (`Sample` records as JSON or JSON lines) and evaluation logs in JSON.

https://inspect.aisi.org.uk/datasets.html, https://inspect.aisi.org.uk/eval-logs.html.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.importers.conversion import each
from eval_gate.importers.records import Imported, ImportOptions, checker, json_document, json_lines, messages
from trace_serve.errors import QueryError


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a sample; of an evaluation log only the first epoch. `metadata.cluster` becomes the cluster key."""
    return each(_samples(path), lambda place, raw: _build(place, raw, options))


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".eval":
        raise QueryError(f"{path}: a packed log; unpack it with `inspect log dump` and convert the JSON", field="in")
    if path.suffix == ".jsonl":
        yield from json_lines(path)
        return
    document = json_document(path)
    samples = document.get("samples") if isinstance(document, dict) else document
    if not isinstance(samples, list):
        raise QueryError(f"{path}: expected a list of samples, or a log with samples", field="in")
    for number, sample in enumerate(samples):
        if isinstance(sample, dict) and sample.get("epoch", 1) != 1:
            continue
        yield f"{path}: samples.{number}", sample


def _build(place: str, raw: Any, options: ImportOptions) -> dict[str, Any]:
    if not isinstance(raw, dict) or "input" not in raw or raw.get("target") in (None, "", []):
        raise QueryError(f"{place}: expected a sample with input and target", field="input")
    given, choices, target = raw["input"], raw.get("choices"), raw["target"]
    metadata = raw.get("metadata") or {}
    record: dict[str, Any] = {
        "id": str(raw["id"]) if raw.get("id") is not None else "sample-" + place.rpartition(":")[2].strip(),
        "max_tokens": options.max_tokens,
        "cluster": str(metadata["cluster"]) if metadata.get("cluster") is not None else None,
    }
    if choices:
        letters = list(string.ascii_uppercase[: len(choices)])
        if not isinstance(given, str) or not isinstance(target, str) or target not in letters:
            raise QueryError(f"{place}: choices need a text and one target letter, got {target!r}", field="target")
        listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(letters, choices, strict=True))
        record["prompt"] = f"{given}\n\n{listed}\n\nAnswer with the letter of the right choice only."
        record["checker"] = {"type": "choice", "options": letters, "expected": target}
        return record
    if isinstance(given, str):
        record["prompt"] = given
    else:
        record["messages"] = messages(given, place)
    record["checker"] = checker(options.checker or "contains", target, place)
    return record
