"""What a progress bar shows while samples come in."""

from __future__ import annotations

import io

from rich.console import Console

from eval_gate.arms.records import Role, SampleRecord
from eval_gate.report.progress import describe, live_progress
from eval_gate.tally import Tally


def sample(role: Role, number: int, passed: bool | None) -> SampleRecord:
    return SampleRecord(key="k", query_id=f"q{number}", role=role, sample=0, request={}, passed=passed)


def test_pairs_count_once_both_arms_have_a_grade() -> None:
    tally = Tally(10, 0.05)
    for number, passed in enumerate([True, True, False, None]):
        tally.note(sample(Role.TRAINING, number, passed))
    assert tally.progress(Role.TRAINING, "sampling").gap is None
    for number, passed in enumerate([True, False, False, True]):
        tally.note(sample(Role.SERVING, number, passed))
    found = tally.progress(Role.SERVING, "done")
    assert (found.done, found.total, found.passed, found.failed) == (4, 10, 2, 0)
    assert found.gap == 1 / 3
    assert found.lower is not None
    assert found.upper is not None
    assert found.lower < found.gap < found.upper


def test_a_graded_answer_replaces_its_missing_grade() -> None:
    tally = Tally(1, 0.05)
    tally.note(sample(Role.TRAINING, 0, True))
    tally.note(sample(Role.SERVING, 0, None))
    assert tally.progress(Role.SERVING, "sampling").failed == 1
    tally.note(sample(Role.SERVING, 0, False))
    found = tally.progress(Role.SERVING, "done")
    assert (found.done, found.failed, found.gap) == (1, 0, 1.0)


def test_the_line_shows_gap_and_interval() -> None:
    tally = Tally(40, 0.05)
    for number in range(40):
        tally.note(sample(Role.TRAINING, number, True))
        tally.note(sample(Role.SERVING, number, number > 3))
    found = tally.progress(Role.SERVING, "done")
    assert describe(found).startswith("pass 90.0%, gap +10.0 [+")
    buffer = io.StringIO()
    with live_progress(Console(file=buffer, force_terminal=False)) as update:
        update(found)
    assert "serving   40/40" in buffer.getvalue()


def test_the_interval_shown_is_never_that_of_far_fewer_pairs() -> None:
    tally = Tally(40, 0.05)
    widths = []
    for number in range(40):
        tally.note(sample(Role.TRAINING, number, True))
    for number in range(40):
        tally.note(sample(Role.SERVING, number, number % 10 > 0))
        found = tally.progress(Role.SERVING, "sampling")
        assert found.lower is not None
        assert found.upper is not None
        widths.append(found.upper - found.lower)
    assert widths[1] > 1.5 * widths[20] > 1.5 * widths[39]
