"""The release rule: a non-inferiority test against a margin."""

from __future__ import annotations

import math
from enum import StrEnum

from eval_gate.stats.table import Interval


class Outcome(StrEnum):
    """What a gate says about a release."""

    PASS = "PASS"
    BLOCK = "BLOCK"
    INCONCLUSIVE = "INCONCLUSIVE"


def decide_interval(interval: Interval, margin: float) -> Outcome:
    """PASS if the upper bound is under the margin, BLOCK if the lower bound is over it, else INCONCLUSIVE.

    A NaN bound never passes and never blocks.
    """
    if interval.upper < margin and not math.isnan(interval.lower):
        return Outcome.PASS
    if interval.lower > margin and not math.isnan(interval.upper):
        return Outcome.BLOCK
    return Outcome.INCONCLUSIVE


def decide_point(gap: float, margin: float) -> Outcome:
    """BLOCK if the measured gap exceeds the margin, else PASS; says nothing about chance."""
    if math.isnan(gap):
        return Outcome.INCONCLUSIVE
    return Outcome.BLOCK if gap > margin else Outcome.PASS


def with_floor(interval: Interval, floor: float) -> Interval:
    """The interval with its upper bound raised to the floor; a NaN floor makes it NaN."""
    upper = math.nan if math.isnan(floor) else max(interval.upper, floor)
    return Interval(interval.lower, upper)
