"""A bounded queue that is fair between keys by the tokens their requests ask for.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): each key has a virtual time that advances by the cost of
what it was given, and the waiting key whose time is lowest goes next. A key that was idle starts at the time of the
last grant, so that it is neither punished nor rewarded for what it did before.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
_SLACK = 64
_REMEMBERED = 1024


class FairQueue(Generic[T]):
    """Items of many keys; first come first served within a key. No operation scans what waits.

    `push`, `remove` and `drop_newest` are O(1), `pop` is O(log keys), all amortized.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[int, tuple[T, int]]] = {}
        self._by_length: dict[int, OrderedDict[str, None]] = {}
        self._longest = 0
        self._size = 0
        self._next_id = 0
        self._times: dict[str, int] = {}
        self._now = 0
        self._prune_at = _SLACK
        self._heap: list[tuple[int, int, str]] = []
        self._in_heap: set[str] = set()

    def __len__(self) -> int:
        return self._size

    def waiting(self, key: str) -> int:
        """Items of one key."""
        return len(self._waiting.get(key, ()))

    @property
    def longest(self) -> int:
        """Items of the key with most."""
        return self._longest

    def push(self, key: str, item: T, cost: int) -> int:
        """Adds an item and returns the number that `remove` takes.

        Args:
            key: whose it is.
            item: anything.
            cost: what it counts for, in tokens.
        """
        self._next_id = number = self._next_id + 1
        queue = self._waiting.setdefault(key, OrderedDict())
        queue[number] = (item, cost)
        self._resized(key, len(queue) - 1, len(queue))
        if key not in self._in_heap:
            self._enter_heap(key)
        return number

    def peek(self) -> tuple[T, int] | None:
        """The item whose turn it is and its cost, or None."""
        key = self._first_key()
        return None if key is None else next(iter(self._waiting[key].values()))

    def pop(self) -> T:
        """Takes out the item that `peek` shows, and charges its key.

        Raises:
            IndexError: nothing waits.
        """
        key = self._first_key()
        if key is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._heap)
        self._in_heap.remove(key)
        queue = self._waiting[key]
        _, (item, cost) = queue.popitem(last=False)
        self._resized(key, len(queue) + 1, len(queue))
        self.charge(key, cost)
        if queue:
            self._enter_heap(key)
        return item

    def charge(self, key: str, cost: int) -> None:
        """Counts tokens that a key is given, also those it got without waiting."""
        self._now = self._start(key)
        self._times[key] = self._now + max(1, cost)
        if len(self._times) > self._prune_at:
            self._prune()

    def remove(self, key: str, number: int) -> bool:
        """Takes out the item that `push` numbered so; False where it has gone already."""
        queue = self._waiting.get(key)
        if queue is None or queue.pop(number, None) is None:
            return False
        self._resized(key, len(queue) + 1, len(queue))
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._rebuild_heap()
        return True

    def drop_newest(self) -> T:
        """Takes out the newest item of a key with most items.

        Raises:
            KeyError: nothing waits.
        """
        key = next(reversed(self._by_length[self._longest]))
        queue = self._waiting[key]
        _, (item, _) = queue.popitem(last=True)
        self._resized(key, len(queue) + 1, len(queue))
        return item

    def forget(self) -> None:
        """Clears what keys were given; for a moment in which nothing waits and nothing runs.

        Raises:
            ValueError: something waits.
        """
        if self._size:
            raise ValueError(f"{self._size} items wait, expected none")
        self._times.clear()
        self._heap.clear()
        self._in_heap.clear()
        self._now = 0

    def _prune(self) -> None:
        """Forgets keys that are not ahead of the rest; of very many, also the half that is least ahead."""
        ahead = {key: time for key, time in self._times.items() if time > self._now}
        if len(ahead) > _REMEMBERED:
            self._now = sorted(ahead.values())[len(ahead) // 2]
            ahead = {key: time for key, time in ahead.items() if time > self._now}
        self._times = ahead
        self._prune_at = 2 * len(ahead) + _SLACK

    def _start(self, key: str) -> int:
        return max(self._now, self._times.get(key, 0))

    def _enter_heap(self, key: str) -> None:
        self._next_id += 1
        self._in_heap.add(key)
        heapq.heappush(self._heap, (self._start(key), self._next_id, key))

    def _first_key(self) -> str | None:
        """The key at the top of the heap, once those whose items were all removed are off it."""
        while self._heap:
            key = self._heap[0][2]
            if key in self._waiting:
                return key
            heapq.heappop(self._heap)
            self._in_heap.remove(key)
        return None

    def _rebuild_heap(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
        self._in_heap = {key for _, _, key in self._heap}
        heapq.heapify(self._heap)

    def _resized(self, key: str, before: int, after: int) -> None:
        """Keeps keys grouped by how many items they have, so that the longest queue is known without a search."""
        self._size += after - before
        if before:
            group = self._by_length[before]
            del group[key]
            if not group:
                del self._by_length[before]
        if after:
            self._by_length.setdefault(after, OrderedDict())[key] = None
        else:
            del self._waiting[key]
        if after > self._longest or (before == self._longest and before not in self._by_length):
            self._longest = after
