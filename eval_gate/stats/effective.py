"""A score bound for clustered queries and for several samples a query."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eval_gate.stats.clustered import paired_difference
from eval_gate.stats.distributions import student_t_quantile
from eval_gate.stats.table import two_sided_z
from eval_gate.stats.tango import upper_limit


def effective_score_upper(
    differences: ArrayLike, clusters: Sequence[Hashable] | NDArray[np.intp] | None, confidence: float
) -> float:
    """Tango's upper bound for as many independent binary pairs as these differences are worth.

    Where losses are rare, few of them seen means a small variance seen as well, and the t interval then ends too low:
    at a true loss equal to the margin it passes up to 19% of runs instead of 5%. A score bound takes the variance at
    the margin instead. The pairs have the mean and the mean square of the d_i; their number is n divided by the design
    effect (clustered over unclustered variance, at least 1) and by (t/z)^2 for the estimated variance.

    Args:
        differences: float64 [n], each in [-1, 1].

    Source: J. N. K. Rao, A. J. Scott, Biometrics 48 (1992) 577-585, applied to T. Tango, Statistics in Medicine 17
    (1998) 891-908. NaN with fewer than two clusters.
    """
    values = np.asarray(differences, dtype=np.float64)
    found = paired_difference(values, clusters)
    if found.degrees_of_freedom < 1:
        return math.nan
    alone = paired_difference(values).standard_error
    design_effect = max(1.0, (found.standard_error / alone) ** 2) if alone > 0 else 1.0
    z = two_sided_z(confidence)
    quantile = student_t_quantile(found.degrees_of_freedom, (1 + confidence) / 2)
    n = len(values) / design_effect / (quantile / z) ** 2
    square = float(values @ values) / len(values)
    return upper_limit(n, n * (square + found.difference) / 2, n * (square - found.difference) / 2, z)
