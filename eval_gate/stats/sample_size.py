"""How many queries a margin needs, and what a number of queries can show."""

from __future__ import annotations

import math
from statistics import NormalDist

from eval_gate.stats.floor import queries_needed


def sample_size(variance: float, margin: float, alpha: float, power: float, expected_gap: float = 0.0) -> int:
    """Queries with which a true gap of `expected_gap` passes with probability `power`.

    n = (z_{1-alpha} + z_{power})^2 * variance / (margin - expected_gap)^2, and never fewer than the zero-discordance
    floor allows.

    Args:
        variance: of one query's difference d_i; for one binary sample an arm it is p_disc - gap^2, with p_disc the
            share of discordant pairs.
        margin: largest acceptable loss, as a share.

    Source: J.-M. Nam, Biometrics 53 (1997) 1422-1430, at equal null and alternative variances.

    Raises:
        ValueError: the expected gap is not under the margin, or an argument is out of range.
    """
    if variance < 0 or not 0 < power < 1 or not 0 < alpha < 0.5:
        raise ValueError(f"expected variance >= 0, 0 < power < 1, 0 < alpha < 0.5; got {variance}, {power}, {alpha}")
    if not expected_gap < margin:
        raise ValueError(f"a gap of {expected_gap} can not pass a margin of {margin}")
    z = NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(power)
    return max(math.ceil(z * z * variance / (margin - expected_gap) ** 2), queries_needed(margin, alpha))


def power_of(n: int, variance: float, margin: float, alpha: float, expected_gap: float = 0.0) -> float:
    """Probability of PASS with `n` queries; 0 when the floor alone forbids it."""
    if n < queries_needed(margin, alpha):
        return 0.0
    if variance == 0:
        return 1.0 if expected_gap < margin else 0.0
    reach = (margin - expected_gap) / math.sqrt(variance / n)
    return NormalDist().cdf(reach - NormalDist().inv_cdf(1 - alpha))
