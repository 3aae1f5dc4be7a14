"""Distances between what a trainer and a rollout think of the same sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CLIP = 5.0
"""Importance ratios outside [1 / CLIP, CLIP] are clipped, as trainers do."""
QUANTILES = (0.01, 0.5, 0.99)
REPLICATES = 2000
SEED = 0


@dataclass(frozen=True)
class Top:
    """The K most probable tokens of a rollout at S positions, the most probable first.

    Attributes:
        ids: int64 [S, K].
        logprobs: float64 [S, K], natural logarithms.
    """

    ids: NDArray[np.int64]
    logprobs: Floats


@dataclass(frozen=True)
class Scores:
    """One rollout's S sampled positions in a training-time version.

    Attributes:
        delta: float64 [S], log p_trainer - log p_rollout of the sampled token.
        kl: float64 [S], see `divergence`.
        agrees: bool [S], see `same_top`.
    """

    delta: Floats
    kl: Floats
    agrees: NDArray[np.bool_]


@dataclass(frozen=True)
class Interval:
    """A percentile interval at 95 %."""

    low: float
    high: float


@dataclass(frozen=True)
class Distance:
    """Over N sampled tokens, with d = log p_trainer - log p_rollout and ratio = exp(d).

    Attributes:
        tokens: N.
        abs_delta: mean |d|.
        k1: mean -d, the plain estimate of KL(rollout || trainer).
        k3: mean ratio - 1 - d, its estimate that is never negative (Schulman, 2020).
        kl: mean KL(rollout || trainer) of the next-token distributions, see `divergence`.
        top1: share of positions where both sides find the same token most probable.
        ratio_quantiles: of the ratio, at `QUANTILES`.
        ratio_max: the largest ratio.
        clipped: share of tokens whose ratio is clipped.
        intervals: of `abs_delta`, `k3`, `kl` and `top1`, rollouts drawn with replacement; empty for a single rollout.
    """

    tokens: int
    abs_delta: float
    k1: float
    k3: float
    kl: float
    top1: float
    ratio_quantiles: tuple[float, ...]
    ratio_max: float
    clipped: float
    intervals: dict[str, Interval]


def divergence(top: Top, trainer: Floats, tokens: NDArray[np.int64], delta: Floats) -> Floats:
    """KL(rollout || trainer) of the next-token distributions at S positions.

    With R for all tokens that are not in `top`, the chain rule splits it into the divergence where R is one outcome,
    which is known, and p(R) times that of the distributions inside R. The latter is estimated from the positions whose
    sampled token lies in R, as k3 of its probabilities given R: without bias where tokens are sampled, and never
    negative. Greedy sampling never draws from R, so there the first part alone is left, a lower bound.

    Args:
        trainer: float64 [S, K], its log-probabilities of the tokens in `top`.
        tokens: int64 [S], the sampled ones.
        delta: float64 [S], log p_trainer - log p_rollout of them.

    Returns:
        float64 [S].
    """
    p, q = np.exp(top.logprobs), np.exp(trainer)
    with np.errstate(invalid="ignore"):
        found: Floats = np.where(p > 0, p * (top.logprobs - trainer), 0.0).sum(axis=1)
    # Below this the remainders are what rounding left of 1 - 1.
    tiny = 1e-6
    rest_p, rest_q = (np.maximum(1 - each.sum(axis=1), tiny) for each in (p, q))
    shift = np.log(rest_p / rest_q)
    found += np.where(rest_p > tiny, rest_p * shift, 0.0)
    outside = (top.ids != tokens[:, None]).all(axis=1)
    inner = delta[outside] + shift[outside]
    found[outside] += np.expm1(inner) - inner
    return found


def same_top(top: Top, trainer: Floats, largest: Floats) -> NDArray[np.bool_]:
    """Whether a most probable token of the rollout is one of the trainer's; BF16 logits tie.

    Args:
        trainer: float64 [S, K], its log-probabilities of the tokens in `top`.
        largest: float64 [S], its largest log-probability over the whole vocabulary.
    """
    most = top.logprobs == top.logprobs[:, :1]
    agrees: NDArray[np.bool_] = np.where(most, trainer, -np.inf).max(axis=1) == largest
    return agrees


def distance(scores: Sequence[Scores]) -> Distance:
    """Over every position of some rollouts.

    Raises:
        ValueError: no positions, arrays of another shape, or a value that is not finite.
    """
    for each in scores:
        if each.delta.ndim != 1 or each.kl.shape != each.delta.shape or each.agrees.shape != each.delta.shape:
            raise ValueError(
                f"scores: got shapes {each.delta.shape}, {each.kl.shape}, {each.agrees.shape}, expected [S]"
            )
    delta = np.concatenate([each.delta for each in scores]) if scores else np.empty(0)
    if not delta.size:
        raise ValueError("scores: got no positions, expected at least one")
    if not all(np.isfinite(each.delta).all() and np.isfinite(each.kl).all() for each in scores):
        raise ValueError("scores: got a value that is not finite")
    ratio = np.exp(delta)
    columns = {
        "abs_delta": [np.abs(each.delta) for each in scores],
        "k3": [np.expm1(each.delta) - each.delta for each in scores],
        "kl": [each.kl for each in scores],
        "top1": [each.agrees.astype(np.float64) for each in scores],
    }
    means = {name: float(np.concatenate(parts).mean()) for name, parts in columns.items()}
    return Distance(
        tokens=int(delta.size),
        k1=float(-delta.mean()),
        ratio_quantiles=tuple(float(value) for value in np.quantile(ratio, QUANTILES)),
        ratio_max=float(ratio.max()),
        clipped=float(((ratio > CLIP) | (ratio < 1 / CLIP)).mean()),
        intervals={name: _interval(parts) for name, parts in columns.items()} if len(scores) > 1 else {},
        **means,
    )


def _interval(parts: Sequence[Floats]) -> Interval:
    """Of the mean over all tokens: tokens of a rollout depend on each other, so whole rollouts are drawn."""
    sums, sizes = np.array([part.sum() for part in parts]), np.array([part.size for part in parts])
    drawn = np.random.default_rng(SEED).integers(len(parts), size=(REPLICATES, len(parts)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return Interval(*(float(value) for value in np.quantile(means, (0.025, 0.975))))
