"""Where a run stands, kept up sample by sample at a constant cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from eval_gate.arms.records import Role, SampleRecord
from eval_gate.stats.table import PairedTable
from eval_gate.stats.tango import tango_interval

_INTERVAL_EVERY_S = 0.5
_INTERVAL_GROWTH = 1.25
"""The bounds shown are of four fifths of the pairs at least, however fast answers come."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        role: the arm at work.
        phase: `starting` its engine, `sampling`, or `done`.
        done: samples that are there, of `total`.
        passed: right answers among them.
        failed: samples without a grade.
        gap: training less serving pass rate over the pairs of samples that are complete; None before the first.
        lower: bound of that gap, taking pairs as independent: for the eye, the verdict computes its own.
        upper: likewise.
    """

    role: Role
    phase: str
    done: int
    total: int
    passed: int
    failed: int
    gap: float | None
    lower: float | None = None
    upper: float | None = None


OnProgress = Callable[[Progress], None]


class Tally:
    """Counts of both arms, and of the pairs of samples that both have graded."""

    def __init__(self, total: int, alpha: float) -> None:
        self._total = total
        self._confidence = 1 - 2 * alpha
        self._grades: dict[tuple[Role, str, int], bool | None] = {}
        self._arms = {role: {True: 0, False: 0, None: 0} for role in Role}
        # In the order of `PairedTable`: both pass, only training, only serving, neither.
        self._pairs = {(a, b): 0 for a in (True, False) for b in (True, False)}
        self._bounds: tuple[float, float] | None = None
        self._bounded = 0
        self._next_bounds = 0.0

    def note(self, record: SampleRecord) -> None:
        """Counts a sample; a later record of the same one replaces the earlier."""
        key = record.role, record.query_id, record.sample
        if key in self._grades:
            self._count(key, self._grades[key], -1)
        self._grades[key] = record.passed
        self._count(key, record.passed, 1)

    def progress(self, role: Role, phase: str) -> Progress:
        counts = self._arms[role]
        table = PairedTable(*self._pairs.values())
        due = time.monotonic() >= self._next_bounds or table.n > _INTERVAL_GROWTH * self._bounded
        if table.n and (phase == "done" or due):
            found = tango_interval(table, self._confidence)
            self._bounds, self._bounded = (found.lower, found.upper), table.n
            self._next_bounds = time.monotonic() + _INTERVAL_EVERY_S
        lower, upper = self._bounds or (None, None)
        return Progress(
            role=role,
            phase=phase,
            done=sum(counts.values()),
            total=self._total,
            passed=counts[True],
            failed=counts[None],
            gap=table.difference if table.n else None,
            lower=lower,
            upper=upper,
        )

    def _count(self, key: tuple[Role, str, int], grade: bool | None, by: int) -> None:
        role, query, sample = key
        self._arms[role][grade] += by
        other = self._grades.get((Role.SERVING if role is Role.TRAINING else Role.TRAINING, query, sample))
        if grade is not None and other is not None:
            self._pairs[(grade, other) if role is Role.TRAINING else (other, grade)] += by
