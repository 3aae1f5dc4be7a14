"""Checkers that are Python functions named in the query file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eval_gate.checkers.outcome import CheckerError, Grade

if TYPE_CHECKING:
    from eval_gate.checkers.specs import PythonFunction

BUILT_IN = frozenset({"eval_gate.checkers.reasoning_gym:score"})
"""Functions of this package; any other one must be allowed by name, since a query file may come from anywhere."""

_EXTRACTED_CHARS = 500


def grade(checker: PythonFunction, answer: str) -> Grade:
    """Calls the function with the answer and the checker's options.

    Raises:
        CheckerError: it cannot be imported, raised, or returned something else than a grade.
    """
    function = load(checker.function)
    try:
        result = function(answer, **checker.options)
    except CheckerError:
        raise
    except Exception as exc:
        raise CheckerError(f"{checker.function}: {type(exc).__name__}: {exc}") from exc
    passed, extracted = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(passed, bool) or not isinstance(extracted, str | None):
        raise CheckerError(f"{checker.function}: returned {result!r:.100}, expected a bool or (bool, text)")
    return Grade(passed, extracted if extracted is None else extracted[:_EXTRACTED_CHARS])


def load(entry_point: str) -> Callable[..., Any]:
    """Imports `module:function`.

    Raises:
        CheckerError: no such module or function.
    """
    module_name, _, name = entry_point.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as exc:
        raise CheckerError(f"{entry_point}: cannot be imported: {type(exc).__name__}: {exc}") from exc
    if not callable(function):
        raise CheckerError(f"{entry_point}: is not a function")
    return function  # type: ignore[no-any-return]
