"""Completes the grades that need a judge, both arms' answers mixed in one seeded random order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval_gate.arms.base import Arm
from eval_gate.arms.records import ErrorClass, Failure, Judgement, SampleRecord
from eval_gate.checkers import CheckerError, Judged
from eval_gate.checkers.judge import read_verdict, request_body, request_key
from eval_gate.queries import Query

NOT_JUDGED = "not judged yet"


class Judging:
    """The judge of one run.

    Equal answers to a query get one judgement, whichever arm they come from.

    Args:
        arm: the judge's model; None when no query has a judge.
        seed: of the order in which answers are judged, so that a judge that drifts does so for both arms alike.
        concurrency: requests in flight.
        known: judgements of earlier runs, by key.
    """

    def __init__(
        self, arm: Arm | None, *, seed: int, concurrency: int, known: Mapping[str, Judgement] | None = None
    ) -> None:
        self._arm = arm
        self._random = random.Random(f"eval-gate/judge/{seed}")
        self._slots = asyncio.Semaphore(concurrency)
        self._known = dict(known or {})
        self._under_way: dict[str, asyncio.Task[Judgement | Failure]] = {}

    async def settle(
        self,
        queries: Sequence[Query],
        arms: Sequence[list[SampleRecord]],
        on_judged: Callable[[SampleRecord], None],
    ) -> None:
        """Judges every answer that waits for it, and puts the completed records in place of the waiting ones."""
        by_id = {query.id: query for query in queries}
        waiting = [
            (samples, place)
            for samples in arms
            for place, record in enumerate(samples)
            if record.failure is not None and record.failure.kind is ErrorClass.JUDGE
        ]
        self._random.shuffle(waiting)

        async def one(samples: list[SampleRecord], place: int) -> None:
            record = samples[place]
            samples[place] = judged(record, await self._judge(by_id[record.query_id], record))
            on_judged(samples[place])

        async with asyncio.TaskGroup() as group:
            for samples, place in waiting:
                group.create_task(one(samples, place))

    async def _judge(self, query: Query, record: SampleRecord) -> Judgement | Failure:
        if self._arm is None or not isinstance(query.checker, Judged):
            return Failure(kind=ErrorClass.JUDGE, message="no judge is configured")
        body = request_body(query.checker.judge, query.prompt_text, record.text or "")
        key = request_key(self._arm.model, body)
        if key in self._known:
            return self._known[key]
        if key not in self._under_way:
            self._under_way[key] = asyncio.ensure_future(self._ask(key, {**body, "model": self._arm.model}))
        found = await asyncio.shield(self._under_way[key])
        if isinstance(found, Judgement):
            self._known[key] = found
        else:
            self._under_way.pop(key, None)
        return found

    async def _ask(self, key: str, body: dict[str, Any]) -> Judgement | Failure:
        assert self._arm is not None
        async with self._slots:
            exchange = await self._arm.complete(body)
        if exchange.text is None:
            reason = exchange.failure.message if exchange.failure else "no answer"
            return Failure(kind=ErrorClass.JUDGE, message=f"judge: {reason}")
        try:
            return Judgement(key=key, passed=read_verdict(exchange.text), text=exchange.text)
        except CheckerError as exc:
            return Failure(kind=ErrorClass.JUDGE, message=str(exc))


def judged(record: SampleRecord, found: Judgement | Failure) -> SampleRecord:
    """The record with the judge's half of its grade."""
    if isinstance(found, Failure):
        return record.model_copy(update={"passed": None, "failure": found})
    return record.model_copy(update={"passed": found.passed, "judgement": found, "failure": None})
