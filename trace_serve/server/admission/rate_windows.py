"""Where `limits` keeps its counts: in this process, without threads, in constant time a request."""

from __future__ import annotations

import time
from collections import OrderedDict

from limits.storage import Storage


class WindowStorage(Storage):
    """Counters that begin with their first hit and end when their window has passed.

    The library's own memory storage starts a timer thread that walks over every counter. Here counters that are over
    are dropped from the old end, at most two for each new one, so that memory follows the keys of the last window.
    """

    STORAGE_SCHEME = None

    def __init__(self, uri: str | None = None, wrap_exceptions: bool = False, **options: float | str | bool) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions, **options)
        self._counters: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def base_exceptions(self) -> type[Exception]:
        return ValueError

    def __len__(self) -> int:
        return len(self._counters)

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        now = time.time()
        count, ends = self._counters.get(key, (0, 0.0))
        if ends <= now:
            self._counters.pop(key, None)
            self._drop_old(now)
            count, ends = 0, now + expiry
        self._counters[key] = count + amount, ends
        return count + amount

    def get(self, key: str) -> int:
        count, ends = self._counters.get(key, (0, 0.0))
        return count if ends > time.time() else 0

    def get_expiry(self, key: str) -> float:
        """When the key's window ends, in seconds since the epoch; now where it has none."""
        now = time.time()
        return max(now, self._counters.get(key, (0, now))[1])

    def check(self) -> bool:
        return True

    def reset(self) -> int:
        count = len(self._counters)
        self._counters.clear()
        return count

    def clear(self, key: str) -> None:
        self._counters.pop(key, None)

    def _drop_old(self, now: float) -> None:
        for _ in range(2):
            oldest = next(iter(self._counters), None)
            if oldest is None or self._counters[oldest][1] > now:
                return
            del self._counters[oldest]
