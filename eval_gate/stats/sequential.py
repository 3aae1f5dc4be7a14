"""Critical values for looking at the data several times: Pocock's constant bound and O'Brien-Fleming's falling one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eval_gate.stats.distributions import normal_cdf

Shape = Literal["obf", "pocock"]

_REACH = 8.5
"""Standard deviations beyond which a normal density is left out of an integral (2e-17)."""


def crossing_probability(fractions: Sequence[float], bounds: Sequence[float], sides: Literal[1, 2] = 1) -> float:
    """Probability under no drift that a sequence of z statistics ever reaches its bounds; see `stopping`."""
    return math.fsum(stopping(fractions, bounds, sides))


def stopping(
    fractions: Sequence[float], bounds: Sequence[float], sides: Literal[1, 2] = 1, drift: float = 0.0
) -> tuple[float, ...]:
    """Probability of reaching a bound for the first time at each look.

    z_k = B(t_k) / sqrt(t_k) for a Brownian motion B; the density of paths that have not crossed is carried from look to
    look by Gauss-Legendre quadrature.

    Args:
        fractions: t_k, information at each look as a share of the last one's; rising, the last need not be 1.
        bounds: critical value of z_k at each look.
        sides: 1 counts z_k >= bound, 2 counts |z_k| >= bound.
        drift: mean of B at 1; with information 1 at the last look it is the mean of the last z.

    Source: P. Armitage, C. K. McPherson, B. C. Rowe, J. R. Stat. Soc. A 132 (1969) 235-244; C. Jennison,
    B. W. Turnbull, Group Sequential Methods (2000), chapter 19.

    Raises:
        ValueError: the lengths differ, or the fractions do not rise from above 0.
    """
    _check_fractions(fractions)
    if len(bounds) != len(fractions):
        raise ValueError(f"got {len(bounds)} bounds for {len(fractions)} looks")
    standard_nodes, weights = _quadrature()
    places: NDArray[np.float64] = np.zeros(1)
    masses: NDArray[np.float64] = np.ones(1)
    crossed = []
    before = 0.0
    for fraction, bound in zip(fractions, bounds, strict=True):
        step = math.sqrt(fraction - before)
        centres = places + drift * (fraction - before)
        high = bound * math.sqrt(fraction)
        above = float(masses @ normal_cdf((centres - high) / step))
        below = float(masses @ normal_cdf((-high - centres) / step)) if sides == 2 else 0.0
        crossed.append(above + below)
        reach = _REACH * math.sqrt(fraction)
        low = max(-high if sides == 2 else -math.inf, drift * fraction - reach)
        top = min(high, drift * fraction + reach)
        if top <= low:
            return (*crossed, *[0.0] * (len(fractions) - len(crossed)))
        nodes = low + (top - low) * (standard_nodes + 1) / 2
        kernel = np.exp(-(((nodes[:, None] - centres[None, :]) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        masses = (kernel @ masses) * weights * (top - low) / 2
        places = nodes
        before = fraction
    return tuple(crossed)


@lru_cache(maxsize=256)
def critical_values(
    fractions: tuple[float, ...], alpha: float, shape: Shape, sides: Literal[1, 2] = 1
) -> tuple[float, ...]:
    """Bounds of z at each look whose overall crossing probability is `alpha`.

    Pocock: one constant. O'Brien-Fleming: constant / sqrt(t_k / t_K), so that early looks stop only on clear cases.

    Source: S. J. Pocock, Biometrika 64 (1977) 191-199; P. C. O'Brien, T. R. Fleming, Biometrics 35 (1979) 549-556.

    Raises:
        ValueError: the fractions do not rise from above 0, or alpha is not between 0 and 0.5 (1 for two sides).
    """
    # Imported here because it takes longer to load than a single look takes to judge.
    from scipy.optimize import brentq

    _check_fractions(fractions)
    if not 0 < alpha < 0.5 * sides:
        raise ValueError(f"alpha must lie between 0 and {0.5 * sides:g}, got {alpha}")
    weights = [1.0 if shape == "pocock" else math.sqrt(fractions[-1] / fraction) for fraction in fractions]

    def excess(constant: float) -> float:
        return crossing_probability(fractions, [constant * weight for weight in weights], sides) - alpha

    constant = float(brentq(excess, 1e-6, 12.0, xtol=1e-10))
    return tuple(constant * weight for weight in weights)


def nominal_levels(fractions: tuple[float, ...], alpha: float, shape: Shape) -> tuple[float, ...]:
    """One-sided level at which each look tests, so that all looks together err with probability `alpha`.

    With one look this is `alpha` itself.
    """
    if len(fractions) == 1:
        return (alpha,)
    return tuple(normal_cdf(-np.array(critical_values(fractions, alpha, shape))).tolist())


@cache
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gauss-Legendre nodes and weights on [-1, 1], float64 [256] each."""
    return np.polynomial.legendre.leggauss(256)


def _check_fractions(fractions: Sequence[float]) -> None:
    before = 0.0
    for fraction in fractions:
        if not fraction > before:
            raise ValueError(f"information fractions must rise from above 0, got {list(fractions)}")
        before = fraction
    if not fractions:
        raise ValueError("got no information fractions, expected one a look")
