"""Normal and Student's t distribution, from scipy at first use: it takes longer to load than most comparisons do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal probability below each z; float64, same shape."""
    from scipy.special import ndtr

    found: NDArray[np.float64] = ndtr(z)
    return found


def student_t_quantile(degrees_of_freedom: float, probability: float) -> float:
    """Value below which Student's t lies with this probability."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, probability))
