"""Automatic graders for one answer: `specs` (what a query file may ask for), `text` (what part of an answer counts).

No model judges here; a grader is a pure function of the answer, and its own fault is never a wrong answer.
"""

from __future__ import annotations

from eval_gate.checkers.grade import CheckerError, Grade, grade
from eval_gate.checkers.specs import Checker

__all__ = ["Checker", "CheckerError", "Grade", "grade"]
