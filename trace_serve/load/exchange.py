"""What became of one arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
    """`refused`: 429 or 503 before a stream began. `left`: the client went away on purpose."""

    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"
    DROPPED = "dropped"
    LEFT = "left"
    UNFINISHED = "unfinished"


class Client(StrEnum):
    """How the client behaved; latencies are those of plain ones alone."""

    PLAIN = "plain"
    SLOW = "slow"
    LEAVES = "leaves"


class Labels(NamedTuple):
    """What answered, by the headers x-trace-*; empty where the server says nothing."""

    policy: str = ""
    digest: str = ""
    weight_version: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One arrival. Times are seconds since the run began.

    Attributes:
        index: its place in the schedule.
        scheduled_s: when it was due; in a closed loop when it was sent.
        sent_s: when the request was handed to the connection; None when it was dropped.
        first_s: first text (or the first event of an answer without text).
        end_s: last byte.
        gaps_s: seconds between successive events with text.
        reason: why it is not `ok`.
        hint_s: seconds until the hint file had come, when it was asked for and came.
    """

    index: int
    scheduled_s: float
    outcome: Outcome
    client: Client = Client.PLAIN
    sent_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    gaps_s: tuple[float, ...] = ()
    reason: str = ""
    labels: Labels = field(default_factory=Labels)
    hint_s: float | None = None
    hint_bytes: int = 0
    hint_fault: str = ""

    @property
    def tpot_s(self) -> float | None:
        """(latency - TTFT) / (tokens - 1); None for answers of one token."""
        if self.first_s is None or self.end_s is None or self.completion_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.completion_tokens - 1)

    def latency(self, metric: str) -> float | None:
        """Seconds of one metric of `histograms.METRICS`; None where it has none."""
        start = self.scheduled_s if metric.endswith("_scheduled") else self.sent_s
        if metric == "tpot":
            return self.tpot_s
        if metric == "lag":
            return None if self.sent_s is None else max(self.sent_s - self.scheduled_s, 0.0)
        if metric == "hints":
            return self.hint_s
        moment = self.first_s if metric.startswith("ttft") else self.end_s
        return None if start is None or moment is None else moment - start
