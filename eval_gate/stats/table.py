"""The 2x2 table of paired binary outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class PairedTable:
    """Counts of pairs: both pass, only A passes, only B passes, both fail.

    Raises:
        ValueError: a count is negative.
    """

    both: int
    only_a: int
    only_b: int
    neither: int

    def __post_init__(self) -> None:
        if min(self.both, self.only_a, self.only_b, self.neither) < 0:
            raise ValueError(f"counts must not be negative, got {self}")

    @property
    def n(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """Pass rate of A minus pass rate of B; NaN when there are no pairs."""
        return (self.only_a - self.only_b) / self.n if self.n else float("nan")

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[bool, bool]]) -> PairedTable:
        counts = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
        for pair in pairs:
            counts[pair] += 1
        return cls(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval; NaN bounds mean that nothing can be said."""

    lower: float
    upper: float


def two_sided_z(confidence: float) -> float:
    """Standard normal quantile of a two-sided interval, e.g. 1.6449 for 0.90.

    Raises:
        ValueError: the confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)
