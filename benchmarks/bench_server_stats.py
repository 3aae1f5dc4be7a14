"""Ratios and differences between arms that took turns, with a bootstrap interval over rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 4000


@dataclass(frozen=True)
class Block:
    """One arm at one concurrency in one round.

    Attributes:
        part: `engine`, or the null upstream's pace.
        arm: the target's name.
        concurrency, round: of the block.
        requests: finished in it.
        wall_s: it took.
        cpu_s: that the server in front of the upstream spent.
        first_s, total_s: seconds to the first event and to the end, for each request.
    """

    part: str
    arm: str
    concurrency: int
    round: int
    requests: int
    wall_s: float
    cpu_s: float
    first_s: tuple[float, ...]
    total_s: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.requests / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds a request."""
        return 1e3 * self.cpu_s / self.requests

    def first_ms(self, share: float) -> float:
        return 1e3 * quantile(self.first_s, share)

    def total_ms(self, share: float) -> float:
        return 1e3 * quantile(self.total_s, share)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Estimate:
    """Median over rounds and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
        return cls(statistics.median(values), quantile(medians, 0.025), quantile(medians, 0.975))

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def compare(
    blocks: Sequence[Block], arm: str, base: str, value: Callable[[Block], float], *, ratio: bool = True
) -> Estimate:
    """`value` of one arm over (or minus) that of another, formed within each round."""
    found = {(block.arm, block.round): value(block) for block in blocks if block.arm in (arm, base)}
    pairs = [(found[arm, number], found[base, number]) for name, number in sorted(found) if name == arm]
    return Estimate.of([one / other if ratio else one - other for one, other in pairs])
