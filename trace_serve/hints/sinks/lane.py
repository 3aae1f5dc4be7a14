"""A bounded queue with one thread behind it. Putting into it takes a mutex that is never held across a write."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NOTES = 1024


class Lane(Generic[T]):
    """Tasks are handled in order; one that has to be tried again later lets the others pass.

    The thread starts with the first task, as a daemon.

    Args:
        name: of the thread.
        handle: called in the thread with a task; returns None when it is done with it, or the seconds until it wants to
            see it again.
        max_items: tasks that are waiting, delayed or being handled.
        max_bytes: their sizes together.
        idle: called in the thread every `idle_every_s` seconds at most, between tasks.
        idle_every_s: None never calls it.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[T], float | None],
        *,
        max_items: int,
        max_bytes: int,
        idle: Callable[[], None] | None = None,
        idle_every_s: float | None = None,
    ) -> None:
        self._name = name
        self._handle = handle
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._idle = idle
        self._idle_every_s = idle_every_s if idle is not None else None
        self._reset()

    def _reset(self) -> None:
        """Also called in a forked child: the parent's thread is not there, and its tasks are the parent's."""
        self._changed = threading.Condition()
        self._ready: deque[tuple[T, int]] = deque()
        self._delayed: list[tuple[float, int, T, int]] = []
        self._notes: deque[Callable[[], None]] = deque()
        self._order = itertools.count()
        self._items = 0
        self._bytes = 0
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._next_idle = time.monotonic() + (self._idle_every_s or 0.0)

    after_fork = _reset

    def put(self, task: T, size: int) -> str | None:
        """Accepts a task, or says which bound is in the way; never waits for a task."""
        size = max(1, size)
        with self._changed:
            if self._closed:
                return "the queue is closed"
            if self._items >= self._max_items:
                return f"the queue holds its limit of {self._max_items} items"
            if self._bytes + size > self._max_bytes:
                return (
                    f"{size} bytes beside {self._bytes} pending ones pass the queue's limit of {self._max_bytes} bytes"
                )
            if not self._wake():
                return "the writer's thread cannot be started"
            self._items += 1
            self._bytes += size
            self._ready.append((task, size))
        return None

    def note(self, action: Callable[[], None]) -> bool:
        """Has a small action run in the thread, beside the tasks' bounds; False where too many are waiting already."""
        with self._changed:
            if self._closed or len(self._notes) >= MAX_NOTES or not self._wake():
                return False
            self._notes.append(action)
        return True

    def pending(self) -> tuple[int, int]:
        """Tasks that are not finished, and their bytes."""
        with self._changed:
            return self._items, self._bytes

    def drain(self, timeout_s: float) -> int:
        """Waits until everything is finished, or the time is over; returns how many tasks are not."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._items or self._notes or self._busy), timeout_s)
            return self._items

    def close(self, timeout_s: float) -> tuple[list[T], list[Callable[[], None]]]:
        """Accepts no more, waits as `drain`, and returns the tasks and notes that will not be handled any more.

        A task that is being handled when the time is over is not among them: its outcome is still open.
        """
        with self._changed:
            self._closed = True
        self.drain(timeout_s)
        with self._changed:
            left = [*self._ready, *((task, size) for _, _, task, size in self._delayed)]
            self._ready.clear()
            self._delayed.clear()
            notes = list(self._notes)
            self._notes.clear()
            self._items -= len(left)
            self._bytes -= sum(size for _, size in left)
            self._changed.notify_all()
            thread, busy = self._thread, self._busy
        if thread is not None and not busy:
            thread.join()
        return [task for task, _ in left], notes

    def _wake(self) -> bool:
        """With the mutex held, so the thread looks for work only after the caller has put it there."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No memory or no process slot left, which is no reason to fail a request.
                return False
            self._thread = thread
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                note, task = self._next()
                if note is None and task is None and self._closed and not self._items:
                    return
            if note is not None:
                self._guarded(note)
            if task is not None:
                self._settle(task)
            self._idle_if_due()
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[Callable[[], None] | None, tuple[T, int] | None]:
        """Waits for something to do, with the mutex held; notes and tasks take turns."""
        while True:
            now = time.monotonic()
            while self._delayed and self._delayed[0][0] <= now:
                _, _, task, size = heapq.heappop(self._delayed)
                self._ready.append((task, size))
            if self._notes or self._ready:
                self._busy = True
                note = self._notes.popleft() if self._notes else None
                return note, self._ready.popleft() if self._ready else None
            due = [when for when, *_ in self._delayed[:1]]
            if self._idle_every_s is not None:
                due.append(self._next_idle)
            if (self._closed and not self._delayed) or (due and min(due) <= now):
                return None, None
            self._changed.wait(min(due) - now if due else None)

    def _settle(self, entry: tuple[T, int]) -> None:
        task, size = entry
        again = self._guarded(lambda: self._handle(task))
        with self._changed:
            if again is not None:
                heapq.heappush(self._delayed, (time.monotonic() + again, next(self._order), task, size))
                return
            self._items -= 1
            self._bytes -= size

    def _idle_if_due(self) -> None:
        if self._idle is not None and self._idle_every_s is not None and time.monotonic() >= self._next_idle:
            self._guarded(self._idle)
            self._next_idle = time.monotonic() + self._idle_every_s

    def _guarded(self, action: Callable[[], float | None]) -> float | None:
        try:
            return action()
        except Exception:
            # The thread has to outlive whatever one task does.
            logger.exception("%s: a task failed in a way that its handler does not know", self._name)
            return None
