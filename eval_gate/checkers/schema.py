"""Answers that must be JSON of a given shape, by `jsonschema` (extra `gate-json`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eval_gate.checkers import text
from eval_gate.checkers.outcome import Grade

if TYPE_CHECKING:
    from eval_gate.checkers.specs import JsonSchema

_EXTRACTED_CHARS = 500


def grade(checker: JsonSchema, answer: str) -> Grade:
    """Validates the first JSON value of the answer."""
    found = text.first_json(answer)
    if found is None:
        return Grade(False, None)
    return Grade(validator(checker.json_schema).is_valid(found), json.dumps(found)[:_EXTRACTED_CHARS])


def validator(schema: dict[str, Any]) -> Any:
    """A draft 2020-12 validator that never fetches a `$ref` from anywhere."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(schema, registry=Registry())


def fault(schema: dict[str, Any]) -> str | None:
    """Why `schema` is no schema; None when it is one."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as exc:
        return str(exc.message)
    return None
