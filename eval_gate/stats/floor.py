"""What "no difference seen" is worth: a lower limit for the upper confidence bound."""

from __future__ import annotations

import math
from statistics import NormalDist


def zero_discordance_floor(n: int, alpha: float) -> float:
    """z^2 / (n + z^2) with one-sided z: the score bound of the loss when n pairs show no loss at all.

    Source: Tango (1998), the upper score limit at b = c = 0, which has this closed form. NaN for n = 0.

    Raises:
        ValueError: n is negative, or alpha is not between 0 and 0.5.
    """
    if n < 0 or not 0 < alpha < 0.5:
        raise ValueError(f"expected n >= 0 and 0 < alpha < 0.5, got n = {n}, alpha = {alpha}")
    if n == 0:
        return math.nan
    z = NormalDist().inv_cdf(1 - alpha)
    return z * z / (n + z * z)


def queries_needed(margin: float, alpha: float) -> int:
    """Smallest n whose floor lies strictly under the margin; fewer queries can never pass.

    Raises:
        ValueError: the margin is not between 0 and 1.
    """
    if not 0 < margin < 1:
        raise ValueError(f"margin must lie between 0 and 1, got {margin}")
    z = NormalDist().inv_cdf(1 - alpha)
    n = max(1, math.floor(z * z * (1 - margin) / margin))
    while zero_discordance_floor(n, alpha) >= margin:
        n += 1
    return n
