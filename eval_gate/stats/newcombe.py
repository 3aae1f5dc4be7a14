"""Newcombe's hybrid score interval for the difference of paired proportions."""

from __future__ import annotations

import math

from eval_gate.stats.table import Interval, PairedTable, two_sided_z


def wilson_interval(passed: int, n: int, confidence: float) -> Interval:
    """Wilson's score interval of one proportion; NaN for n = 0.

    Source: E. B. Wilson, JASA 22 (1927) 209-212.
    """
    if n == 0:
        return Interval(math.nan, math.nan)
    z = two_sided_z(confidence)
    rate = passed / n
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def newcombe_interval(table: PairedTable, confidence: float) -> Interval:
    """Method 10: Wilson limits of both pass rates, joined through a continuity-corrected phi.

    Source: R. G. Newcombe, Statistics in Medicine 17 (1998) 2635-2650.
    """
    if table.n == 0:
        return Interval(math.nan, math.nan)
    pass_a = table.both + table.only_a
    pass_b = table.both + table.only_b
    a, b = wilson_interval(pass_a, table.n, confidence), wilson_interval(pass_b, table.n, confidence)
    rate_a, rate_b = pass_a / table.n, pass_b / table.n
    phi = _corrected_phi(table)
    below = (rate_a - a.lower, b.upper - rate_b)
    above = (a.upper - rate_a, rate_b - b.lower)
    return Interval(
        table.difference - _joined(below, phi),
        table.difference + _joined(above, phi),
    )


def _corrected_phi(table: PairedTable) -> float:
    n, e, f, g, h = table.n, table.both, table.only_a, table.only_b, table.neither
    product = (e + f) * (g + h) * (e + g) * (f + h)
    if product == 0:
        return 0.0
    cross = e * h - f * g
    corrected = max(cross - n / 2, 0.0) if cross > 0 else float(cross)
    return corrected / math.sqrt(product)


def _joined(parts: tuple[float, float], phi: float) -> float:
    one, two = parts
    return math.sqrt(max(one * one - 2 * phi * one * two + two * two, 0.0))
