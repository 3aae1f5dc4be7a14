"""The Agresti-Min interval: Wald after adding half a pair to every cell."""

from __future__ import annotations

import math

from eval_gate.stats.table import Interval, PairedTable, two_sided_z


def agresti_min_interval(table: PairedTable, confidence: float) -> Interval:
    """Wald interval with 0.5 added to each of the four counts.

    Source: A. Agresti, Y. Min, Statistics in Medicine 24 (2005) 729-740.
    """
    if table.n == 0:
        return Interval(math.nan, math.nan)
    b, c, n = table.only_a + 0.5, table.only_b + 0.5, table.n + 2
    centre = (b - c) / n
    half_width = two_sided_z(confidence) * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    return Interval(centre - half_width, centre + half_width)
