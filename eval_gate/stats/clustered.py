"""Mean paired difference with a cluster-robust standard error."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from eval_gate.stats.table import Interval


@dataclass(frozen=True)
class PairedEstimate:
    """D = mean of d_i, its standard error, and the degrees of freedom of t (clusters less one)."""

    difference: float
    standard_error: float
    degrees_of_freedom: int

    def interval(self, confidence: float) -> Interval:
        """D plus and minus t * SE, cut to [-1, 1]; NaN with fewer than two clusters."""
        if self.degrees_of_freedom < 1 or math.isnan(self.standard_error):
            return Interval(math.nan, math.nan)
        quantile = float(stdtrit(self.degrees_of_freedom, (1 + confidence) / 2))
        reach = quantile * self.standard_error
        return Interval(max(-1.0, self.difference - reach), min(1.0, self.difference + reach))


def paired_difference(differences: Sequence[float], clusters: Sequence[Hashable] | None = None) -> PairedEstimate:
    """Estimates the mean difference of a population of queries.

    The variance is G/(G-1) * sum over clusters of (sum of d_i - D in the cluster)^2 / n^2; with one query a cluster
    this is the usual s^2/n.

    Args:
        differences: d_i = pass rate of A less pass rate of B for query i, each in [-1, 1].
        clusters: label of each query's cluster; None means that queries are independent.

    Source: E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640, sections 2.2 and 4, with the small-sample factor
    G/(G-1) of C. Cameron and D. Miller, Journal of Human Resources 50 (2015) 317-372.

    Raises:
        ValueError: the lengths differ.
    """
    n = len(differences)
    if clusters is not None and len(clusters) != n:
        raise ValueError(f"got {len(clusters)} cluster labels for {n} differences")
    if n == 0:
        return PairedEstimate(math.nan, math.nan, 0)
    mean = math.fsum(differences) / n
    residuals: dict[Hashable, float] = defaultdict(float)
    for index, difference in enumerate(differences):
        residuals[index if clusters is None else clusters[index]] += difference - mean
    groups = len(residuals)
    if groups < 2:
        return PairedEstimate(mean, math.nan, 0)
    variance = groups / (groups - 1) * math.fsum(r * r for r in residuals.values()) / (n * n)
    return PairedEstimate(mean, math.sqrt(variance), groups - 1)


def fixed_set_standard_error(rates_a: Sequence[float], rates_b: Sequence[float], k_a: int, k_b: int) -> float:
    """Standard error of D over resampling of exactly these queries: only sampling noise counts.

    SE^2 = sum over queries of [p_A (1 - p_A) / (k_A - 1) + p_B (1 - p_B) / (k_B - 1)] / n^2, the unbiased estimate of
    each query's sampling variance. NaN when either arm has fewer than two samples a query.

    Raises:
        ValueError: the lengths differ.
    """
    if len(rates_a) != len(rates_b):
        raise ValueError(f"got {len(rates_a)} and {len(rates_b)} pass rates")
    n = len(rates_a)
    if n == 0 or k_a < 2 or k_b < 2:
        return math.nan
    total = math.fsum(a * (1 - a) / (k_a - 1) + b * (1 - b) / (k_b - 1) for a, b in zip(rates_a, rates_b, strict=True))
    return math.sqrt(total) / n
