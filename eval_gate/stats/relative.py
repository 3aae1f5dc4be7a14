"""Score interval for the relative loss of paired binary outcomes: (p_A - p_B) / p_A."""

from __future__ import annotations

import math

from eval_gate.stats.table import Interval, PairedTable, two_sided_z

_BISECTIONS = 60


def contrast_score(table: PairedTable, weights: tuple[float, float, float, float]) -> float:
    """Score statistic of "the mean of `weights` over pairs is zero".

    The variance is taken at the multinomial maximum likelihood under that hypothesis, p_j = x_j / (n + lambda g_j).
    With weights (-delta, 1 - delta, -1 - delta, -delta) this is Tango's statistic.

    Args:
        weights: g_j of a pair that both pass, only A passes, only B passes, both fail.

    Source: J.-M. Nam, W. C. Blackwelder, Statistics in Medicine 21 (2002) 689-699, here for any linear contrast.
    """
    counts = (table.both, table.only_a, table.only_b, table.neither)
    n = table.n
    total = math.fsum(x * g for x, g in zip(counts, weights, strict=True))
    chances = _constrained(counts, weights, n)
    if chances is None:
        return math.copysign(math.inf, total) if total else 0.0
    variance = n * math.fsum(p * g * g for p, g in zip(chances, weights, strict=True))
    if variance <= 0:
        return math.copysign(math.inf, total) if total else 0.0
    return total / math.sqrt(variance)


def relative_loss_interval(table: PairedTable, confidence: float) -> Interval:
    """Two-sided interval of the share of A's passes that B loses, at most 1; NaN where A never passes."""
    if table.both + table.only_a == 0:
        return Interval(math.nan, math.nan)
    z = two_sided_z(confidence)
    estimate = (table.only_a - table.only_b) / (table.both + table.only_a)
    # A gain may be any multiple of what A passes; far more than B could show bounds the search.
    return Interval(_limit(table, z, -4.0 * (table.n + 1), estimate), _limit(table, -z, estimate, 1.0))


def _limit(table: PairedTable, z: float, low: float, high: float) -> float:
    """Where the statistic, which falls as the loss rises, comes down to `z`."""

    def statistic(loss: float) -> float:
        kept = 1 - loss
        return contrast_score(table, (kept - 1, kept, -1.0, 0.0))

    if statistic(high) >= z and z < 0:
        return high
    if statistic(low) <= z and z > 0:
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if statistic(middle) > z else (low, middle)
    return (low + high) / 2


def _constrained(counts: tuple[int, ...], weights: tuple[float, ...], n: int) -> tuple[float, ...] | None:
    """Cell probabilities of highest likelihood with a zero mean of the weights; None where there are none."""
    if not min(weights) < 0 < max(weights):
        return None
    low, high = -n / max(weights), -n / min(weights)

    def slope(multiplier: float) -> float:
        return math.fsum(
            x * g / (n + multiplier * g) for x, g in zip(counts, weights, strict=True) if x and n + multiplier * g > 0
        )

    # A cell without pairs may hold probability only where its denominator is zero, at an end of the range.
    top, bottom = weights.index(max(weights)), weights.index(min(weights))
    for end, cell in ((low, top), (high, bottom)):
        if counts[cell]:
            continue
        rest = slope(end)
        if rest * weights[cell] <= 0:
            chances = [
                x / (n + end * g) if x and index != cell else 0.0
                for index, (x, g) in enumerate(zip(counts, weights, strict=True))
            ]
            chances[cell] = -rest / weights[cell]
            return tuple(chances)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    multiplier = (low + high) / 2
    return tuple(x / (n + multiplier * g) if x else 0.0 for x, g in zip(counts, weights, strict=True))
