"""Ratios of two arms that were measured in interleaved blocks, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Reduces the last axis."""
REPLICATES = 2000
CHUNK = 4_000_000
"""Values drawn at a time, which bounds memory."""
LEVEL = 0.95


class Ratio(BaseModel):
    """B over A of one statistic.

    Attributes:
        low, high: percentile interval at 95 %; None with fewer than two rounds.
        rounds: the ratio of each round, so that a reader sees the spread.
    """

    name: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    rounds: list[float]


def ratio(name: str, blocks: Sequence[tuple[Floats, Floats]], statistic: Statistic, seed: int) -> Ratio:
    """The geometric mean over rounds of statistic(B) / statistic(A).

    A replicate draws rounds with replacement, and within each drawn round arrivals with replacement, the same ones in
    both arms: what a round has in common (the machine's load) and what an arrival has (its query) is kept together.
    (A two-stage bootstrap as in Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8.)

    Args:
        blocks: a round each, values of arms A and B in the same order of arrivals.
    """
    per_round = [float(statistic(b) / statistic(a)) for a, b in blocks]
    low = high = None
    if len(blocks) > 1:
        generator = np.random.default_rng(seed)
        drawn = generator.integers(len(blocks), size=(REPLICATES, len(blocks)))
        logs = np.empty(drawn.shape)
        for number, (a, b) in enumerate(blocks):
            logs[drawn == number] = _replicates(a, b, statistic, int((drawn == number).sum()), generator)
        tail = (1 - LEVEL) / 2
        low, high = (float(np.exp(np.quantile(logs.mean(axis=1), share))) for share in (tail, 1 - tail))
    return Ratio(
        name=name,
        a=float(np.mean([statistic(a) for a, _ in blocks])),
        b=float(np.mean([statistic(b) for _, b in blocks])),
        ratio=float(np.exp(np.mean(np.log(per_round)))),
        low=low,
        high=high,
        rounds=per_round,
    )


def _replicates(a: Floats, b: Floats, statistic: Statistic, count: int, generator: np.random.Generator) -> Floats:
    """`count` logarithms of the ratio over arrivals drawn with replacement. Shape [count]."""
    parts = []
    rows = max(CHUNK // len(a), 1)
    for start in range(0, count, rows):
        drawn = generator.integers(len(a), size=(min(rows, count - start), len(a)))
        parts.append(np.log(statistic(b[drawn]) / statistic(a[drawn])))
    return np.concatenate(parts) if parts else np.empty(0)
