"""McNemar's test of "both arms pass equally often", two-sided, in four forms.

Source: M. W. Fagerland, S. Lydersen, P. Laake, BMC Medical Research Methodology 13 (2013) 91.
All depend only on b (only A passes) and c (only B passes), and give p = 1 when there is no discordant pair.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple


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
    return float(min(Fraction(1), 2 * _tail(min(b, c), b + c)))


def mid_p(b: int, c: int) -> float:
    """The exact p value less the probability of the observed split."""
    if b + c == 0:
        return 1.0
    observed = Fraction(math.comb(b + c, b), 2 ** (b + c))
    return float(min(Fraction(1), 2 * _tail(min(b, c), b + c)) - observed) if b != c else float(1 - observed)


def _chi_square(distance: float, discordant: int) -> ChiSquare:
    if discordant == 0:
        return ChiSquare(0.0, 1.0)
    statistic = distance * distance / discordant
    return ChiSquare(statistic, math.erfc(math.sqrt(statistic / 2)))


def _tail(successes: int, trials: int) -> Fraction:
    """P(X <= successes) of a fair binomial, exactly."""
    return Fraction(sum(math.comb(trials, k) for k in range(successes + 1)), 2**trials)
