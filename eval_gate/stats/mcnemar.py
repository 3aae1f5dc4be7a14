"""McNemar's test of "both arms pass equally often", two-sided, in four forms.

Source: M. W. Fagerland, S. Lydersen, P. Laake, BMC Medical Research Methodology 13 (2013) 91.
All depend only on b (only A passes) and c (only B passes), and give p = 1 when there is no discordant pair.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.stats import binom


class ChiSquare(NamedTuple):
    """A chi-square statistic with one degree of freedom, and its p value."""

    statistic: float
    p: float


def asymptotic(b: int, c: int) -> ChiSquare:
    return _chi_square(abs(b - c), b + c)


def continuity_corrected(b: int, c: int) -> ChiSquare:
    """Edwards' correction: |b - c| - 1."""
    return _chi_square(max(abs(b - c) - 1, 0), b + c)


def exact(b: int, c: int) -> float:
    """Conditional binomial p value, doubled one-sided, at most 1."""
    if b + c == 0:
        return 1.0
    return min(1.0, 2 * float(binom.cdf(min(b, c), b + c, 0.5)))


def mid_p(b: int, c: int) -> float:
    """The exact p value less the probability of the observed split."""
    if b + c == 0:
        return 1.0
    if b == c:
        return 1.0 - float(binom.pmf(b, b + c, 0.5))
    return 2 * float(binom.cdf(min(b, c), b + c, 0.5)) - float(binom.pmf(min(b, c), b + c, 0.5))


def _chi_square(distance: float, discordant: int) -> ChiSquare:
    if discordant == 0:
        return ChiSquare(0.0, 1.0)
    statistic = distance * distance / discordant
    return ChiSquare(statistic, math.erfc(math.sqrt(statistic / 2)))
