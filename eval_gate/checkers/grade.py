"""Grades one answer under one checker that is a program, in this process; `pool` puts it into a process of its own."""

from __future__ import annotations

import json
import re
from typing import Any

from eval_gate.checkers import functions, schema, specs, symbolic, text, unit_tests
from eval_gate.checkers.outcome import CheckerError, Grade

MAX_ANSWER_CHARS = 1_000_000


def grade(checker: specs.Program, response: str) -> Grade:
    """Grades `response` after removing its reasoning.

    Raises:
        CheckerError: the checker could not do its work, whatever the answer was.
    """
    if len(response) > MAX_ANSWER_CHARS:
        raise CheckerError(f"answer has {len(response)} characters, more than the {MAX_ANSWER_CHARS} a checker reads")
    try:
        return _grade(checker, text.strip_reasoning(response))
    except (RecursionError, MemoryError, re.error) as exc:
        raise CheckerError(f"{checker.type}: {type(exc).__name__}: {exc}") from exc


def _grade(checker: specs.Program, answer: str) -> Grade:
    match checker:
        case specs.Exact():
            return Grade(answer == checker.expected.strip(), answer)
        case specs.Normalized():
            got = text.normalize(answer)
            return Grade(got == text.normalize(checker.expected), got)
        case specs.Numeric():
            return _numeric(checker, answer)
        case specs.Regex():
            return _regex(checker, answer)
        case specs.Choice():
            return _choice(checker, answer)
        case specs.Contains():
            return _contains(checker, answer)
        case specs.Prefix():
            found = next((one for one in checker.alternatives if answer.startswith(one.strip())), None)
            return Grade(found is not None, found)
        case specs.JsonField():
            return _json_field(checker, answer)
        case specs.Math():
            return symbolic.grade(checker, answer)
        case specs.JsonSchema():
            return schema.grade(checker, answer)
        case specs.UnitTests():
            return unit_tests.grade(checker, answer)
        case specs.PythonFunction():
            return functions.grade(checker, answer)


def _numeric(checker: specs.Numeric, answer: str) -> Grade:
    boxed = text.last_boxed(answer)
    found = text.numbers(answer if boxed is None else boxed)
    if not found:
        return Grade(False, None)
    allowed = max(checker.absolute_tolerance, checker.relative_tolerance * abs(checker.expected))
    return Grade(abs(found[-1] - checker.expected) <= allowed, f"{found[-1]:.12g}")


def _regex(checker: specs.Regex, answer: str) -> Grade:
    pattern = re.compile(checker.pattern, re.IGNORECASE if checker.ignore_case else 0)
    match = pattern.fullmatch(answer) if checker.full else pattern.search(answer)
    return Grade(match is not None, match.group() if match else None)


def _choice(checker: specs.Choice, answer: str) -> Grade:
    lowered = answer.casefold()
    mentioned = {option: text.find_word(option.casefold(), lowered) for option in checker.options}
    places = [(place, -len(option), option) for option, place in mentioned.items() if place >= 0]
    if not places:
        return Grade(False, None)
    first = min(places)[2]
    return Grade(first == checker.expected, first)


def _contains(checker: specs.Contains, answer: str) -> Grade:
    haystack = answer.casefold() if checker.ignore_case else answer
    for expected in checker.alternatives:
        needle = expected.casefold() if checker.ignore_case else expected
        place = text.find_word(needle, haystack) if checker.whole_word else haystack.find(needle)
        if place >= 0:
            return Grade(True, expected)
    return Grade(False, None)


def _json_field(checker: specs.JsonField, answer: str) -> Grade:
    found = text.first_json(answer, "{")
    if not isinstance(found, dict):
        return Grade(False, None)
    value: Any = found
    for key in checker.path.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return Grade(False, None)
    expected = checker.expected
    if isinstance(value, str) and isinstance(expected, str):
        return Grade(text.normalize(value) == text.normalize(expected), value)
    same_type = isinstance(value, bool) == isinstance(expected, bool)
    return Grade(same_type and value == expected, json.dumps(value))
