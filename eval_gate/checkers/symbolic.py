"""Mathematical equality, by `math-verify` (extra `gate-math`)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from eval_gate.checkers import text
from eval_gate.checkers.outcome import CheckerError, Grade

if TYPE_CHECKING:
    from eval_gate.checkers.specs import Math

_EXTRACTED_CHARS = 500


def grade(checker: Math, answer: str) -> Grade:
    r"""Compares the last `\boxed{}` of the answer, or the last expression found in it, with the expected one.

    Raises:
        CheckerError: the expected expression cannot be read, or the comparison itself failed.
    """
    from math_verify import verify

    gold = _gold(checker.expected)
    boxed = text.last_boxed(answer)
    got = _parse(answer if boxed is None else f"\\boxed{{{boxed}}}")
    if not got:
        return Grade(False, None)
    try:
        # The pool ends a comparison that takes too long; the library's own alarm would only turn it into "wrong".
        equal = verify(list(gold), got, timeout_seconds=None, raise_on_error=True)
    except Exception as exc:
        raise CheckerError(f"math: {type(exc).__name__}: {exc}") from exc
    return Grade(bool(equal), (str(got[-1]) if boxed is None else boxed)[:_EXTRACTED_CHARS])


@lru_cache(maxsize=4096)
def _gold(expected: str) -> tuple[Any, ...]:
    inner = text.last_boxed(expected)
    parsed = _parse(f"\\boxed{{{expected if inner is None else inner}}}") or _parse(expected)
    if not parsed:
        raise CheckerError(f"math: expected {expected!r} is not a mathematical expression")
    return tuple(parsed)


def _parse(source: str) -> list[Any]:
    from math_verify import parse

    try:
        return list(parse(source, parsing_timeout=None, raise_on_error=True))
    except Exception as exc:
        raise CheckerError(f"math: {type(exc).__name__}: {exc}") from exc
