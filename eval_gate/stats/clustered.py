"""Mean paired difference with a cluster-robust standard error."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eval_gate.stats.distributions import student_t_quantile
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
        quantile = student_t_quantile(self.degrees_of_freedom, (1 + confidence) / 2)
        reach = quantile * self.standard_error
        return Interval(max(-1.0, self.difference - reach), min(1.0, self.difference + reach))


def paired_difference(
    differences: ArrayLike, clusters: Sequence[Hashable] | NDArray[np.intp] | None = None
) -> PairedEstimate:
    """Estimates the mean difference of a population of queries.

    The variance is G/(G-1) * sum over clusters of (sum of d_i - D in the cluster)^2 / n^2; with one query a cluster
    this is the usual s^2/n.

    Args:
        differences: float64 [n], d_i = pass rate of A less pass rate of B for query i, each in [-1, 1].
        clusters: label of each query's cluster, or [n] cluster numbers from 0; None means that queries are independent.

    Source: E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640, sections 2.2 and 4, with the small-sample factor
    G/(G-1) of C. Cameron and D. Miller, Journal of Human Resources 50 (2015) 317-372.

    Raises:
        ValueError: the lengths differ.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if clusters is not None and len(clusters) != n:
        raise ValueError(f"got {len(clusters)} cluster labels for {n} differences")
    if n == 0:
        return PairedEstimate(math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    residuals: NDArray[np.float64] = values - mean
    if clusters is not None:
        residuals = np.bincount(cluster_numbers(clusters), weights=residuals).astype(np.float64)
    groups = len(residuals)
    if groups < 2:
        return PairedEstimate(mean, math.nan, 0)
    variance = groups / (groups - 1) * float(residuals @ residuals) / (n * n)
    return PairedEstimate(mean, math.sqrt(variance), groups - 1)


def cluster_numbers(labels: Sequence[Hashable] | NDArray[np.intp]) -> NDArray[np.intp]:
    """Labels as numbers 0 ... G-1 without gaps."""
    if isinstance(labels, np.ndarray):
        return np.unique(labels, return_inverse=True)[1]
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(label, len(numbers)) for label in labels), dtype=np.intp, count=len(labels))


def fixed_set_standard_error(
    rates_a: ArrayLike, rates_b: ArrayLike, k_a: int, k_b: int, *, weight_a: float = 1.0
) -> float:
    """Standard error of w * mean(p_A) - mean(p_B) over resampling of exactly these queries (w = `weight_a`).

    SE^2 = sum over queries of [w^2 p_A (1 - p_A) / (k_A - 1) + p_B (1 - p_B) / (k_B - 1)] / n^2, the unbiased estimate
    of each query's sampling variance. NaN when either arm has fewer than two samples a query.

    Raises:
        ValueError: the lengths differ.
    """
    a, b = np.asarray(rates_a, dtype=np.float64), np.asarray(rates_b, dtype=np.float64)
    if len(a) != len(b):
        raise ValueError(f"got {len(a)} and {len(b)} pass rates")
    n = len(a)
    if n == 0 or k_a < 2 or k_b < 2:
        return math.nan
    total = math.fsum(weight_a**2 * a * (1 - a) / (k_a - 1) + b * (1 - b) / (k_b - 1))
    return math.sqrt(total) / n
