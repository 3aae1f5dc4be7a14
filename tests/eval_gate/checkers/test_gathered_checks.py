"""Answers that come one by one are graded many at once, and nobody's grade outlives who waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import TypeAdapter

from eval_gate.checkers import CheckerError, Grade, GraderPool, PoolLimits, Program, gathering
from eval_gate.checkers.gathering import GatheredChecks

PROGRAM: TypeAdapter[Program] = TypeAdapter(Program)
EXACT = PROGRAM.validate_python({"type": "exact", "expected": "yes"})
HANGS = PROGRAM.validate_python({"type": "regex", "pattern": r"(a+)+$"})
HANG_ANSWER = "a" * 40 + "b"


class Counting(GraderPool):
    """The real pool; `sizes` has the number of checks of each hand-over."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(PoolLimits(workers=1, **limits))
        self.sizes: list[int] = []

    async def grade_many(self, checks: Any) -> list[Grade | CheckerError]:
        self.sizes.append(len(checks))
        return await super().grade_many(checks)


async def test_answers_that_come_together_are_handed_over_together_each_with_its_own_grade() -> None:
    async with Counting() as pool, GatheredChecks(pool) as checks:
        answers = ["yes" if number % 3 else "no" for number in range(100)]
        grades = await asyncio.gather(*(checks.grade(EXACT, answer) for answer in answers))
    assert [grade.passed for grade in grades if isinstance(grade, Grade)] == [answer == "yes" for answer in answers]
    assert pool.sizes == [64, 36]


async def test_the_last_answer_of_all_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_WAIT_S", 3600.0)
    async with Counting() as pool, GatheredChecks(pool) as checks, asyncio.TaskGroup() as group:
        first = group.create_task(checks.grade(EXACT, "yes"))
        await asyncio.sleep(0)
        await checks.grade(EXACT, "no", last=True)
    assert first.result() == Grade(True, "yes")
    assert pool.sizes == [2]


async def test_a_check_that_hangs_costs_no_grade_of_its_batch() -> None:
    async with Counting(timeout_s=2.0) as pool, GatheredChecks(pool) as checks:
        found = await asyncio.gather(
            checks.grade(EXACT, "yes"), checks.grade(HANGS, HANG_ANSWER), checks.grade(EXACT, "no")
        )
    assert [isinstance(one, CheckerError) for one in found] == [False, True, False]
    assert pool.sizes == [3]


async def test_checks_that_nobody_waits_for_any_more_are_dropped_and_start_no_process() -> None:
    pool = Counting()
    waiting: list[asyncio.Task[Grade | CheckerError]] = []

    async def interrupted() -> None:
        async with GatheredChecks(pool) as checks, asyncio.TaskGroup() as group:
            waiting.extend(group.create_task(checks.grade(HANGS, HANG_ANSWER)) for _ in range(5))
            while not pool.sizes or not pool._idle.empty():
                await asyncio.sleep(0.01)
            raise ValueError("stop")

    async with pool:
        with pytest.raises(ExceptionGroup):
            await interrupted()
    assert len(waiting) == 5
    assert all(task.cancelled() for task in waiting)
    assert all(worker._process is None for worker in pool._workers)


async def test_a_check_that_is_cancelled_while_its_process_starts_ends_and_leaves_none() -> None:
    for turns in range(12):
        pool = Counting()
        async with pool:
            task = asyncio.ensure_future(pool.grade_many([(EXACT, "yes")]))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool._workers[0]._process is None
