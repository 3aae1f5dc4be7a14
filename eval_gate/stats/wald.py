"""The Wald interval of the paired difference; for comparison with older reports, not for decisions."""

from __future__ import annotations

import math

from eval_gate.stats.table import Interval, PairedTable, two_sided_z


def wald_interval(table: PairedTable, confidence: float) -> Interval:
    """Difference plus and minus z * sqrt((b + c) - (b - c)^2 / n) / n; has zero width when b = c = 0.

    Source: M. W. Fagerland, S. Lydersen, P. Laake, Statistics in Medicine 33 (2014) 2850-2875, equation 6.
    """
    if table.n == 0:
        return Interval(math.nan, math.nan)
    b, c, n = table.only_a, table.only_b, table.n
    half_width = two_sided_z(confidence) * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    return Interval(table.difference - half_width, table.difference + half_width)
