"""Bounds of the JSON Schemas that a client may send, so that compiling one to a grammar stays short.

Measured on the CPU engine with xgrammar: schemas at these bounds compile in less than half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_NESTING = 64
MAX_SCHEMA_VALUES = 8192
MAX_PATTERN = 512
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
MAX_COUNT = 1_000_000
_SAME_PLACE = ("allOf", "anyOf", "oneOf")


def check_json_schema(schema: Mapping[str, Any]) -> None:
    """Refuses a schema that is too large, or that no grammar can be made of; what is in it is the engine's to judge.

    Raises:
        ValueError: what was got and what was expected.
    """
    for count, (value, depth, key) in enumerate(_walk(schema), start=1):
        if depth > MAX_SCHEMA_NESTING:
            raise ValueError(f"nested deeper than {MAX_SCHEMA_NESTING} levels")
        if count > MAX_SCHEMA_VALUES:
            raise ValueError(f"more than {MAX_SCHEMA_VALUES} values")
        _check_value(key, value)
    size = len(orjson.dumps(schema, option=orjson.OPT_NON_STR_KEYS))
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"got {size} bytes, expected at most {MAX_SCHEMA_BYTES}")
    _check_references(schema)


def _walk(root: object) -> Iterator[tuple[object, int, str | None]]:
    """Every value below a JSON value with its depth and, in an object, its key; without recursion."""
    pending: list[tuple[object, int, str | None]] = [(root, 1, None)]
    while pending:
        value, depth, key = pending.pop()
        yield value, depth, key
        if isinstance(value, Mapping):
            pending += [(child, depth + 1, str(name)) for name, child in value.items()]
        elif isinstance(value, list):
            pending += [(child, depth + 1, None) for child in value]


def _check_value(key: str | None, value: object) -> None:
    if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
        raise ValueError(f"$ref: got {value[:60]!r}, expected a place in the same schema (#/...)")
    if key == "pattern" and isinstance(value, str) and len(value) > MAX_PATTERN:
        raise ValueError(f"pattern: got {len(value)} characters, expected at most {MAX_PATTERN}")
    if key in _COUNTS and isinstance(value, int | float) and not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{key}: got {value}, expected 0 to {MAX_COUNT}")


def _check_references(schema: Mapping[str, Any]) -> None:
    """A reference that leads back to itself before any character of text describes nothing."""
    done: set[str] = set()
    for value, _, _ in _walk(schema):
        pending = [(reference, False) for reference in _references(value)]
        open_now: set[str] = set()
        while pending:
            reference, leaving = pending.pop()
            if leaving:
                open_now.discard(reference)
                done.add(reference)
            elif reference in open_now:
                raise ValueError(f"$ref: {reference[:60]!r} refers to itself and describes nothing")
            elif reference not in done:
                open_now.add(reference)
                pending.append((reference, True))
                pending += [(each, False) for each in _references(_target(schema, reference))]


def _references(schema: object) -> list[str]:
    """The references that stand where `schema` itself stands."""
    found: list[str] = []
    pending = [schema]
    while pending:
        value = pending.pop()
        if not isinstance(value, Mapping):
            continue
        if isinstance(value.get("$ref"), str):
            found.append(value["$ref"])
        for word in _SAME_PLACE:
            choices = value.get(word)
            pending += choices if isinstance(choices, list) else []
    return found


def _target(root: Mapping[str, Any], reference: str) -> object:
    found: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
