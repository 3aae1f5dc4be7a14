"""Tango's score interval for the difference of paired proportions."""

from __future__ import annotations

import math
from collections.abc import Callable

from eval_gate.stats.table import Interval, PairedTable, two_sided_z

_BISECTIONS = 60


def score(table: PairedTable, delta: float) -> float:
    """Score statistic of "the true difference is `delta`"; falls as delta rises.

    Source: T. Tango, Statistics in Medicine 17 (1998) 891-908, equations 5-7.
    """
    return score_of_counts(table.n, table.only_a, table.only_b, delta)


def score_of_counts(n: float, b: float, c: float, delta: float) -> float:
    """The same for n pairs, b of them passed by A only and c by B only; counts need not be whole."""
    linear = -b - c + (2 * n - b + c) * delta
    root = math.sqrt(max(linear * linear + 8 * n * c * delta * (1 - delta), 0.0))
    # The nuisance parameter p21 at its maximum under delta; the second form does not cancel when linear > 0.
    if linear > 0:
        p21 = 2 * c * delta * (delta - 1) / (-linear - root) if delta else 0.0
    else:
        p21 = (root - linear) / (4 * n)
    p21 = max(p21, 0.0, -delta)
    variance = n * (2 * p21 + delta * (1 - delta))
    distance = b - c - n * delta
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def tango_interval(table: PairedTable, confidence: float) -> Interval:
    """Two-sided score interval, found by bisection to double precision; NaN for an empty table."""
    if table.n == 0:
        return Interval(math.nan, math.nan)
    z = two_sided_z(confidence)
    n, b, c = table.n, table.only_a, table.only_b
    return Interval(-upper_limit(n, c, b, z), upper_limit(n, b, c, z))


def upper_limit(n: float, b: float, c: float, z: float) -> float:
    """The difference at which the statistic of these counts comes down to -z."""
    return _bisect(lambda delta: score_of_counts(n, b, c, delta) >= -z, (b - c) / n, 1.0)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The point where `holds` (true at the low end) turns false."""
    if high <= low or holds(high):
        return high
    if not holds(low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
