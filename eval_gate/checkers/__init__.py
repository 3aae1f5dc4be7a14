"""Graders for one answer: `specs` (what a query file may ask for), `text` (what part of it counts), `pool` (where they
run). A grader's own fault is never a wrong answer. The one grader that is a model is `judge`.
"""

from __future__ import annotations

from eval_gate.checkers.allowed import Permissions, check_allowed
from eval_gate.checkers.grade import grade
from eval_gate.checkers.outcome import CheckerError, Grade
from eval_gate.checkers.pool import GraderPool, PoolLimits
from eval_gate.checkers.specs import Checker, Judged, Program, program_of

__all__ = [
    "Checker",
    "CheckerError",
    "Grade",
    "GraderPool",
    "Judged",
    "Permissions",
    "PoolLimits",
    "Program",
    "check_allowed",
    "grade",
    "program_of",
]
