"""What each checker takes for a right answer."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from eval_gate.checkers import Checker, CheckerError, grade
from eval_gate.checkers.grade import MAX_ANSWER_CHARS

ADAPTER: TypeAdapter[Checker] = TypeAdapter(Checker)


def passes(spec: dict[str, Any], response: str) -> bool:
    return grade(ADAPTER.validate_python(spec), response).passed


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"<think>\boxed{12}</think> \boxed{70}", True),
        (r"\boxed{12} so \boxed{70}", True),
        (r"\boxed{70} as shown in step 3", True),
        (r"\boxed{\text{about } 70}", True),
        (r"<think>it is 70", False),
        (r"70 is wrong</think>The answer is 71.", False),
        ("<think>71</think>70", True),
        ("The answer is 70.", True),
        ("Seventy", False),
        ("", False),
        ("$70", True),
        ("70 or 71", False),
    ],
)
def test_numeric_takes_the_last_number_or_box_after_reasoning(response: str, right: bool) -> None:
    assert passes({"type": "numeric", "expected": 70}, response) is right


@pytest.mark.parametrize(
    ("expected", "response"),
    [(1234.5, "1,234.50"), (-3, "x = -3"), (4, "7-3 = 4"), (3, "7-3"), (2500, "2.5e3"), (0.5, ".5")],
)
def test_numeric_reads_the_usual_ways_to_write_a_number(expected: float, response: str) -> None:
    assert passes({"type": "numeric", "expected": expected}, response)


def test_numeric_tolerance_is_inclusive() -> None:
    spec = {"type": "numeric", "expected": 100, "relative_tolerance": 0.01}
    assert passes(spec, "101")
    assert not passes(spec, "101.1")


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        ({"type": "exact", "expected": "Paris"}, " Paris\n", "paris"),
        ({"type": "normalized", "expected": "May 3"}, "may  3.", "May 13"),
        ({"type": "regex", "pattern": r"\bA-\d+"}, "order A-12", "order A-"),
        ({"type": "regex", "pattern": r"\d+", "full": True}, "12", "12 "[:2] + "x"),
        ({"type": "contains", "expected": "Paris"}, "It is PARIS.", "It is Rome."),
        ({"type": "contains", "expected": ["Kyiv", "Kiev"]}, "Kiev", "Lviv"),
        ({"type": "contains", "expected": "new", "whole_word": True}, "It is new.", "renewed"),
        ({"type": "choice", "options": ["good", "bad"], "expected": "good"}, "Good, not bad", "bad, not good"),
        ({"type": "choice", "options": ["a", "b"], "expected": "b"}, "b", "a cab"),
        ({"type": "json", "path": "order", "expected": "A-1"}, 'Sure: {"order": "A-1"} ok', '{"order": "A-2"}'),
        ({"type": "json", "path": "rows.0.n", "expected": 2}, '{"rows": [{"n": 2}]}', '{"rows": []}'),
        ({"type": "json", "path": "ok", "expected": True}, '{"ok": true}', '{"ok": 1}'),
        ({"type": "json", "path": "a", "expected": "x"}, '{"a": "x"}', '{"a": '),
    ],
)
def test_right_and_wrong_answers(spec: dict[str, Any], right: str, wrong: str) -> None:
    assert passes(spec, right)
    assert not passes(spec, wrong)


def test_a_checker_that_cannot_work_raises_instead_of_failing_the_answer() -> None:
    checker = ADAPTER.validate_python({"type": "json", "path": "a", "expected": 1})
    with pytest.raises(CheckerError):
        grade(checker, "1" * (MAX_ANSWER_CHARS + 1))
    with pytest.raises(CheckerError, match="RecursionError"):
        grade(checker, '{"a":' * 100_000)


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "regex", "pattern": "("},
        {"type": "choice", "options": ["a", "b"], "expected": "c"},
        {"type": "choice", "options": ["a", "A"], "expected": "a"},
        {"type": "numeric", "expected": float("nan")},
        {"type": "numeric", "expected": 1, "absolute_tolerance": -1},
        {"type": "exact", "expected": "a", "case": False},
        {"type": "unknown", "expected": "a"},
    ],
)
def test_faulty_checkers_are_refused_when_the_file_is_read(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(spec)
