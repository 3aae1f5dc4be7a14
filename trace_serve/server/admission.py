"""Decides which requests enter the engine now, which wait, and which are turned away with a Retry-After."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque

from trace_serve.server.errors import ApiError, rate_limited, unavailable


class Admission:
    """A bounded in-flight count with a bounded first-come-first-served queue.

    Args:
        max_in_flight: requests inside the engine at once.
        max_queue: requests waiting for a place; 0 refuses as soon as the engine is full.
        max_per_key: running and waiting requests of one key, or None for no limit.
        queue_timeout_s: longest wait.
    """

    def __init__(self, *, max_in_flight: int, max_queue: int, max_per_key: int | None, queue_timeout_s: float) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._max_per_key = max_per_key
        self._queue_timeout_s = queue_timeout_s
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._per_key: Counter[str] = Counter()
        self._mean_service_s = 1.0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def acquire(self, key: str) -> Ticket:
        """Waits for a place.

        Raises:
            ApiError: 429 when the key has too many requests, 503 when the queue is full or the wait too long.
        """
        if self._max_per_key is not None and self._per_key[key] >= self._max_per_key:
            raise rate_limited(
                f"this key already has {self._max_per_key} requests running or waiting; retry later",
                self._mean_service_s,
            )
        self._per_key[key] += 1
        try:
            await self._take_place()
        except BaseException:
            self._forget(key)
            raise
        return Ticket(self, key)

    def refuse_waiting(self, error: ApiError) -> None:
        """Turns away everything that waits, for example because the server stops."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    async def _take_place(self) -> None:
        if self._in_flight < self._max_in_flight:
            self._in_flight += 1
            return
        if len(self._waiting) >= self._max_queue:
            raise unavailable(
                f"the queue is full ({len(self._waiting)} waiting); retry later",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await place
        except TimeoutError:
            self._abandon(place)
            raise unavailable(
                f"no place became free in {self._queue_timeout_s:g} s; retry later",
                code="queue_timeout",
                retry_after_s=self._retry_after_s(),
            ) from None
        except BaseException:
            self._abandon(place)
            raise

    def _abandon(self, place: asyncio.Future[None]) -> None:
        """A place that was handed over in the very moment its request gave up goes to the next one."""
        if place.done() and not place.cancelled() and place.exception() is None:
            self._hand_over()
        elif place in self._waiting:
            self._waiting.remove(place)

    def _hand_over(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._in_flight -= 1

    def _release(self, key: str, service_s: float) -> None:
        self._mean_service_s += 0.1 * (service_s - self._mean_service_s)
        self._forget(key)
        self._hand_over()

    def _forget(self, key: str) -> None:
        self._per_key[key] -= 1
        if self._per_key[key] <= 0:
            del self._per_key[key]

    def _retry_after_s(self) -> float:
        rounds = (len(self._waiting) + 1) / self._max_in_flight
        return min(60.0, max(1.0, self._mean_service_s * rounds))


class Ticket:
    """One place in the engine; released once, however often `release` is called."""

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission = admission
        self._key = key
        self._taken_at = time.monotonic()
        self._released = False

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._admission._release(self._key, time.monotonic() - self._taken_at)
