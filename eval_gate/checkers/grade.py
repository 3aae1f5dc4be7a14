"""Grades one answer under one checker."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from eval_gate.checkers import specs, text

MAX_ANSWER_CHARS = 1_000_000


class Grade(NamedTuple):
    """`passed`, and the part of the answer that was compared (None when nothing comparable was found)."""

    passed: bool
    extracted: str | None


class CheckerError(Exception):
    """The checker itself failed; the answer is neither right nor wrong."""


def grade(checker: specs.Checker, response: str) -> Grade:
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


def _grade(checker: specs.Checker, answer: str) -> Grade:
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
        case specs.JsonField():
            return _json_field(checker, answer)


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
    found = _first_object(answer)
    if found is None:
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


def _first_object(answer: str) -> dict[str, Any] | None:
    decoder = json.JSONDecoder()
    start = answer.find("{")
    while start != -1:
        try:
            value, _ = decoder.raw_decode(answer, start)
        except ValueError:
            start = answer.find("{", start + 1)
            continue
        return value if isinstance(value, dict) else None
    return None
