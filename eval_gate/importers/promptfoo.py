"""promptfoo configurations (YAML or JSON): `prompts` crossed with `tests`, each with `vars` and `assert`.

https://www.promptfoo.dev/docs/configuration/reference. Prompts are texts or chat messages in JSON with `{{name}}` in
them; filters, loops and files are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.importers.conversion import each
from eval_gate.importers.records import (
    Imported,
    ImportOptions,
    UnsupportedRecordError,
    json_document,
    messages,
    yaml_document,
)
from trace_serve.errors import QueryError

_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")
_TEMPLATE = re.compile(r"\{\{|\{%")


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a test and prompt. A test that was written once belongs to one cluster over all prompts."""
    document = json_document(path) if path.suffix == ".json" else yaml_document(path)
    if not isinstance(document, dict):
        raise QueryError(f"{path}: expected a configuration with prompts and tests", field="in")
    prompts, tests = document.get("prompts"), document.get("tests")
    if not isinstance(prompts, list) or not isinstance(tests, list) or not prompts or not tests:
        raise QueryError(f"{path}: prompts and tests: expected a list of each in the file itself", field="in")
    default = document.get("defaultTest") if isinstance(document.get("defaultTest"), dict) else {}
    pairs = (
        (f"{path}: tests.{number}", (number, index, len(prompts), prompt, test))
        for number, test in enumerate(tests)
        for index, prompt in enumerate(prompts)
    )
    return each(pairs, lambda place, raw: _build(place, *raw, default=default or {}, options=options))


def _build(
    place: str,
    number: int,
    index: int,
    prompts: int,
    prompt: Any,
    test: Any,
    *,
    default: dict[str, Any],
    options: ImportOptions,
) -> dict[str, Any]:
    if not isinstance(test, dict):
        raise UnsupportedRecordError(
            f"{place}: got {type(test).__name__}, expected a test in the file itself", field="tests"
        )
    values = {**(default.get("vars") or {}), **(test.get("vars") or {})}
    asserts = [*(default.get("assert") or []), *(test.get("assert") or [])]
    if len(asserts) != 1:
        raise UnsupportedRecordError(
            f"{place}: has {len(asserts)} assertions, expected one; split it into tests of one each", field="assert"
        )
    rendered = _render(_prompt_text(prompt, place), values, place)
    record: dict[str, Any] = {
        "id": f"test-{number}" + (f"-prompt-{index}" if prompts > 1 else ""),
        "max_tokens": options.max_tokens,
        "cluster": f"test-{number}" if prompts > 1 else None,
        "checker": _checker(asserts[0], values, place),
    }
    if rendered.lstrip().startswith("["):
        try:
            record["messages"] = messages(json.loads(rendered), place)
            return record
        except json.JSONDecodeError:
            pass
    return {**record, "prompt": rendered}


def _prompt_text(prompt: Any, place: str) -> str:
    text = prompt.get("raw") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str) or text.startswith("file://"):
        raise UnsupportedRecordError(f"{place}: a prompt that is not a text in the file itself", field="prompts")
    return text


def _render(template: str, values: dict[str, Any], place: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        found = values.get(name)
        if not isinstance(found, str | int | float):
            raise UnsupportedRecordError(f"{place}: vars.{name}: expected a text or number", field="vars")
        if isinstance(found, str) and found.startswith("file://"):
            raise UnsupportedRecordError(f"{place}: vars.{name}: files are not read", field="vars")
        return str(found)

    # Values may hold braces of their own, so what is left unfilled is looked for in the template.
    if _TEMPLATE.search(_VARIABLE.sub("", template)):
        raise UnsupportedRecordError(
            f"{place}: the template has filters or blocks, expected {{{{name}}}} alone", field="prompts"
        )
    return _VARIABLE.sub(value, template)


def _checker(raw: Any, values: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise QueryError(f"{place}: assert: expected a type", field="assert")
    kind, value = raw["type"], raw.get("value")
    many = value if isinstance(value, list) else [value]
    texts = [_render(one, values, place) if isinstance(one, str) else one for one in many]
    if kind in ("contains", "icontains", "contains-any", "icontains-any"):
        return {"type": "contains", "expected": texts if len(texts) > 1 else texts[0], "ignore_case": kind[0] == "i"}
    if kind == "is-json" and (value is None or isinstance(value, dict)):
        return {"type": "json_schema", "schema": value or {}}
    simple = {"equals": ("exact", "expected"), "regex": ("regex", "pattern"), "starts-with": ("prefix", "expected")}
    if kind not in simple or len(texts) != 1 or not isinstance(texts[0], str):
        raise UnsupportedRecordError(
            f"{place}: assertion {kind!r} has no counterpart among checkers that are programs", field="assert"
        )
    ours, name = simple[kind]
    return {"type": ours, name: texts[0]}
