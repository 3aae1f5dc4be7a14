"""Checks that come one by one, handed to the pool together: each hand-over wakes another process."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from eval_gate.checkers.outcome import CheckerError, Grade
from eval_gate.checkers.pool import BATCH, GraderPool
from eval_gate.checkers.specs import Program

_WAIT_S = 0.05
"""An answer waits for others no longer than this; nothing else waits for its grade."""


class GatheredChecks:
    """Grades answers in the pool, as many at once as came within a few milliseconds; an async context manager.

    At its end, checks that nobody waits for any more are dropped.
    """

    def __init__(self, graders: GraderPool) -> None:
        self._graders = graders
        self._checks: list[tuple[Program, str]] = []
        self._places: list[asyncio.Future[Grade | CheckerError]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def grade(self, checker: Program, response: str, *, last: bool = False) -> Grade | CheckerError:
        """The grade, or the fault of a checker that could not tell.

        Args:
            last: no other answer will come, so there is nothing to wait for.
        """
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Grade | CheckerError] = loop.create_future()
        self._checks.append((checker, response))
        self._places.append(place)
        if last or len(self._checks) >= BATCH:
            self._hand_over()
        elif self._timer is None:
            self._timer = loop.call_later(_WAIT_S, self._hand_over)
        return await place

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        checks, self._checks = self._checks, []
        places, self._places = self._places, []
        task = asyncio.get_running_loop().create_task(self._run(checks, places))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(self, checks: list[tuple[Program, str]], places: list[asyncio.Future[Grade | CheckerError]]) -> None:
        try:
            results = await self._graders.grade_many(checks)
        except BaseException as exc:
            for place in places:
                if not place.done():
                    place.set_exception(exc) if isinstance(exc, Exception) else place.cancel()
            if not isinstance(exc, Exception):
                raise
            return
        for place, result in zip(places, results, strict=True):
            if not place.done():
                place.set_result(result)
