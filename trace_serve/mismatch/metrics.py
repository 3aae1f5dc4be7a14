"""Distances between the log-probabilities that a trainer and a rollout give to the same sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLIP = 5.0
"""Importance ratios outside [1 / CLIP, CLIP] are clipped, as trainers do."""
QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True)
class Distance:
    """Over N sampled tokens, with d = log p_trainer - log p_rollout and ratio = exp(d).

    Attributes:
        tokens: N.
        abs_delta: mean |d|.
        k1: mean -d, the plain estimate of KL(rollout || trainer).
        k3: mean ratio - 1 - d, its estimate that is never negative (Schulman, 2020).
        ratio_quantiles: of the ratio, at `QUANTILES`.
        ratio_max: the largest ratio.
        clipped: share of tokens whose ratio is clipped.
        router_agreement: share of the rollout's expert choices that the trainer's router makes too, or None.
        bits_differ: share of values whose code has another lowest bit, by site; empty where nothing is quantized.
        gradient_cosine: mean over layers of the cosine to the reference gradient; None where it was not computed.
    """

    tokens: int
    abs_delta: float
    k1: float
    k3: float
    ratio_quantiles: tuple[float, ...]
    ratio_max: float
    clipped: float
    router_agreement: float | None
    bits_differ: dict[str, float]
    gradient_cosine: float | None = None


def distance(
    trainer: NDArray[np.float64],
    rollout: NDArray[np.float64],
    *,
    router_agreement: float | None = None,
    bits_differ: dict[str, float] | None = None,
) -> Distance:
    """Compares two arrays of log-probabilities [N], natural logarithms.

    Raises:
        ValueError: no tokens, another shape, or a value that is not finite.
    """
    if trainer.shape != rollout.shape or trainer.ndim != 1 or not trainer.size:
        raise ValueError(f"log-probabilities: got shapes {trainer.shape} and {rollout.shape}, expected one [N], N > 0")
    if not (np.isfinite(trainer).all() and np.isfinite(rollout).all()):
        raise ValueError("log-probabilities: got a value that is not finite")
    delta = trainer - rollout
    ratio = np.exp(delta)
    return Distance(
        tokens=int(delta.size),
        abs_delta=float(np.abs(delta).mean()),
        k1=float(-delta.mean()),
        k3=float((np.expm1(delta) - delta).mean()),
        ratio_quantiles=tuple(float(value) for value in np.quantile(ratio, QUANTILES)),
        ratio_max=float(ratio.max()),
        clipped=float(((ratio > CLIP) | (ratio < 1 / CLIP)).mean()),
        router_agreement=router_agreement,
        bits_differ=bits_differ or {},
    )
