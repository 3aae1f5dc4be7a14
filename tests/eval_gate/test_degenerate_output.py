"""Which answers count as one unit repeated to the limit."""

from __future__ import annotations

import pytest

from eval_gate.degenerate import is_degenerate


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("!" * 24, 24, True),
        ("!!!!", 4, True),
        ("the the the the the the the the", 8, True),
        ("abcabcabcabcab", None, True),
        ("", 8, True),
        ("  \n", 8, True),
        ("The capital of France is Paris and", 8, False),
        ("1111", 12, False),
        ("!!!", 3, False),
    ],
)
def test_degenerate_at_the_limit(text: str, tokens: int | None, expected: bool) -> None:
    assert is_degenerate(text, "length", tokens) is expected


def test_an_answer_that_stopped_by_itself_is_not_degenerate() -> None:
    assert not is_degenerate("!" * 24, "stop", 24)
