"""Bounds of the JSON Schemas that a client may send, so that compiling one to a grammar stays short.

SGLang compiles a schema in a thread of its scheduler, so a slow one delays its own request and no other. With xgrammar
0.2.7 on two busy cores a schema of 64 KiB with 1200 patterns took 1.4 s; a pattern of nested counted repetitions, which
the bound on expanded patterns refuses, 8 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_NESTING = 48
MAX_SCHEMA_VALUES = 8192
MAX_PATTERN = 512
MAX_PATTERN_EXPANDED = 100_000
"""Characters of all patterns of one schema, with every counted repetition written out."""
_REPEAT = re.compile(r"\{(\d+)(,(\d*))?\}")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
MAX_COUNT = 1_000_000
_SAME_PLACE = ("allOf", "anyOf", "oneOf")


def check_json_schema(schema: Mapping[str, Any]) -> None:
    """Refuses a schema that is too large, or that no grammar can be made of; what is in it is the engine's to judge.

    Raises:
        ValueError: what was got and what was expected.
    """
    expanded = 0
    for count, (value, depth, key) in enumerate(_walk(schema), start=1):
        if depth > MAX_SCHEMA_NESTING:
            raise ValueError(f"nested deeper than {MAX_SCHEMA_NESTING} levels")
        if count > MAX_SCHEMA_VALUES:
            raise ValueError(f"more than {MAX_SCHEMA_VALUES} values")
        _check_value(key, value)
        if key == "pattern" and isinstance(value, str):
            expanded += _expanded_length(value)
            if expanded > MAX_PATTERN_EXPANDED:
                raise ValueError(
                    f"pattern: expands to more than {MAX_PATTERN_EXPANDED} characters, of all patterns together"
                )
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


def _expanded_length(pattern: str) -> int:
    """Characters of a pattern with its counted repetitions written out; of groups too, nested or not."""
    sizes, last = [0], 0
    at = 0
    while at < len(pattern):
        repeat = _REPEAT.match(pattern, at)
        if repeat is not None:
            count = int(repeat[3] or repeat[1])
            sizes[-1] += last * max(0, count - 1)
            last *= max(1, count)
            at = repeat.end()
            continue
        if pattern[at] == "(":
            sizes.append(0)
        elif pattern[at] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
            at += pattern[at] == "\\"
        at += 1
        if sum(sizes) > MAX_PATTERN_EXPANDED:
            break
    return sum(sizes)


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
