"""Decides which requests enter the engine now, which wait, and which are turned away with a Retry-After."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from trace_serve.server.admission.fair_queue import FairQueue
from trace_serve.server.errors import ApiError, rate_limited, unavailable


@dataclass(eq=False)
class _Waiter:
    """One request in the queue: `place` is done when it may run."""

    cost: int
    place: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Bounds requests and tokens in the engine, behind a bounded queue that is fair between keys.

    A key that floods the queue waits behind its own requests only: the next place goes to the key that has been given
    the fewest tokens, and in a full queue a key with fewer requests waiting takes the place of the newest request of
    the key with most. A request whose turn it is but that does not fit holds back those behind it, so that large
    requests are not passed over for ever.

    Args:
        max_in_flight: requests inside the engine at once.
        max_queue: requests waiting for a place; 0 refuses as soon as the engine is full.
        max_per_key: running and waiting requests of one key, or None for no limit; a key may have its own.
        queue_timeout_s: longest wait.
        max_tokens: prompt and completion tokens of the requests inside the engine, or None for no limit. One request
            alone may exceed it.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        max_queue: int,
        max_per_key: int | None,
        queue_timeout_s: float,
        max_tokens: int | None = None,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._max_per_key = max_per_key
        self._max_tokens = max_tokens
        self._queue_timeout_s = queue_timeout_s
        self._in_flight = 0
        self._tokens = 0
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._per_key: Counter[str] = Counter()
        self._mean_service_s = 1.0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def tokens_in_flight(self) -> int:
        """Prompt and completion tokens that the requests inside the engine may use."""
        return self._tokens

    async def acquire(self, key: str, tokens: int = 0, *, concurrent: int | None = None) -> Ticket:
        """Waits for a place.

        Args:
            key: the client that the request counts for.
            tokens: prompt and completion tokens that it may use.
            concurrent: running and waiting requests of this key, instead of `max_per_key`.

        Raises:
            ApiError: 429 when the key has too many requests, 503 when the queue is full or the wait too long.
        """
        limit = concurrent if concurrent is not None else self._max_per_key
        if limit is not None and self._per_key[key] >= limit:
            raise rate_limited(
                f"this key already has {limit} requests running or waiting; retry later", self._mean_service_s
            )
        self._per_key[key] += 1
        try:
            await self._take_place(key, tokens)
        except BaseException:
            self._forget(key)
            raise
        return Ticket(self, key, tokens)

    def refuse_waiting(self, error: ApiError) -> None:
        """Turns away everything that waits, for example because the server stops."""
        while self._queue:
            _refuse(self._queue.drop_newest(), error)

    async def _take_place(self, key: str, tokens: int) -> None:
        if not self._queue and self._fits(tokens):
            self._queue.charge(key, tokens)
            self._enter(tokens)
            return
        self._make_room(key)
        waiter = _Waiter(tokens)
        number = self._queue.push(key, waiter, tokens)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await waiter.place
        except TimeoutError:
            self._abandon(key, number, waiter)
            raise unavailable(
                f"no place became free in {self._queue_timeout_s:g} s; retry later",
                code="queue_timeout",
                retry_after_s=self._retry_after_s(),
            ) from None
        except BaseException:
            self._abandon(key, number, waiter)
            raise

    def _make_room(self, key: str) -> None:
        if len(self._queue) < self._max_queue:
            return
        if self._queue.waiting(key) + 1 >= self._queue.longest:
            raise unavailable(
                f"the queue is full ({len(self._queue)} waiting); retry later",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )
        error = rate_limited(
            "the queue is full, and this key has the most requests waiting; retry later", self._retry_after_s()
        )
        _refuse(self._queue.drop_newest(), error)

    def _fits(self, tokens: int) -> bool:
        if self._in_flight >= self._max_in_flight:
            return False
        return self._max_tokens is None or self._in_flight == 0 or self._tokens + tokens <= self._max_tokens

    def _enter(self, tokens: int) -> None:
        self._in_flight += 1
        self._tokens += tokens

    def _leave(self, tokens: int) -> None:
        self._in_flight -= 1
        self._tokens -= tokens
        self._hand_over()

    def _abandon(self, key: str, number: int, waiter: _Waiter) -> None:
        """A place that was handed over in the very moment its request gave up goes to the next one."""
        place = waiter.place
        if place.done() and not place.cancelled() and place.exception() is None:
            self._leave(waiter.cost)
        elif self._queue.remove(key, number):
            self._hand_over()

    def _hand_over(self) -> None:
        """Lets in whoever is next, as long as they fit."""
        while (head := self._queue.peek()) is not None and self._fits(head[1]):
            waiter = self._queue.pop()
            if not waiter.place.done():
                self._enter(waiter.cost)
                waiter.place.set_result(None)
        if not self._queue and self._in_flight == 0:
            self._queue.forget()

    def _recount(self, before: int, after: int) -> None:
        self._tokens += after - before
        if after < before:
            self._hand_over()

    def _release(self, key: str, tokens: int, service_s: float) -> None:
        self._mean_service_s += 0.1 * (service_s - self._mean_service_s)
        self._forget(key)
        self._leave(tokens)

    def _forget(self, key: str) -> None:
        self._per_key[key] -= 1
        if self._per_key[key] <= 0:
            del self._per_key[key]

    def _retry_after_s(self) -> float:
        rounds = (len(self._queue) + 1) / self._max_in_flight
        return min(60.0, max(1.0, self._mean_service_s * rounds))


class Ticket:
    """One place in the engine; released once, however often `release` is called."""

    def __init__(self, admission: Admission, key: str, tokens: int = 0) -> None:
        self._admission = admission
        self._key = key
        self._tokens = tokens
        self._taken_at = time.monotonic()
        self._released = False

    def recount(self, tokens: int) -> None:
        """Replaces the estimate by which the request came in, once its prompt has been counted."""
        if not self._released:
            self._admission._recount(self._tokens, tokens)
            self._tokens = tokens

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._admission._release(self._key, self._tokens, time.monotonic() - self._taken_at)


def _refuse(waiter: _Waiter, error: ApiError) -> None:
    if not waiter.place.done():
        waiter.place.set_exception(error)
