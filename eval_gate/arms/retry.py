"""Which failures of an exchange are worth another attempt, and how long to wait for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from eval_gate.arms.records import ErrorClass

RETRIED = frozenset({ErrorClass.CONNECTION, ErrorClass.RATE_LIMITED, ErrorClass.SERVER})
"""A time-out is not retried: the same request would take as long again and hide a slow server."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with jitter.

    Attributes:
        attempts: requests made for one sample at most, the first included.
        first_delay_s: wait before the second attempt; doubles each time.
        longest_delay_s: upper limit of one wait, a server's Retry-After included.
    """

    attempts: int = 4
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0

    def delay_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 1)."""
        backoff: float = self.first_delay_s * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
        return min(max(backoff, retry_after_s or 0.0), self.longest_delay_s)


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, from now where it is a date; None for a past date, nonsense or nothing."""
    text = (value or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return None
    return seconds if seconds > 0 else None


def classify_status(status: int) -> ErrorClass:
    """Error class of an HTTP status that is not 200."""
    if status == 429:
        return ErrorClass.RATE_LIMITED
    return ErrorClass.SERVER if status >= 500 else ErrorClass.REQUEST
