"""Distances against values worked out by hand, against each other, and against whole distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trace_serve.mismatch.metrics import Scores, Top, distance, divergence, same_top

DELTAS = arrays(np.float64, st.integers(1, 40), elements=st.floats(-12, 12))


def scores(delta: object, kl: object = None, agrees: object = None) -> Scores:
    array = np.array(delta, dtype=np.float64)
    return Scores(
        array,
        np.zeros_like(array) if kl is None else np.array(kl, dtype=np.float64),
        np.ones(array.shape, dtype=np.bool_) if agrees is None else np.array(agrees),
    )


def test_three_tokens_by_hand() -> None:
    found = distance([scores(np.log([2, 1]), [0.5, 0], [True, False]), scores([math.log(9)], [0.1], [True])])
    assert found.tokens == 3
    assert found.abs_delta == pytest.approx((math.log(2) + 0 + math.log(9)) / 3)
    assert found.k1 == pytest.approx(-(math.log(2) + math.log(9)) / 3)
    assert found.k3 == pytest.approx(((2 - 1 - math.log(2)) + 0 + (9 - 1 - math.log(9))) / 3)
    assert found.kl == pytest.approx(0.2)
    assert found.top1 == pytest.approx(2 / 3)
    assert found.ratio_max == pytest.approx(9)
    assert found.ratio_quantiles[1] == pytest.approx(2)
    assert found.clipped == pytest.approx(1 / 3)


@given(DELTAS)
def test_k3_is_never_negative_and_equal_sides_are_no_distance_apart(delta: np.ndarray) -> None:
    assert distance([scores(delta)]).k3 >= 0
    same = distance([scores(np.zeros_like(delta))])
    assert (same.abs_delta, same.k1, same.k3, same.clipped, same.ratio_quantiles) == (0, 0, 0, 0, (1, 1, 1))


def test_k1_and_k3_estimate_the_divergence_of_two_distributions() -> None:
    generator = np.random.default_rng(0)
    p, q = generator.dirichlet(np.ones(20)), generator.dirichlet(np.ones(20))
    p = 0.7 * p + 0.3 * q
    drawn = generator.choice(20, size=200_000, p=p)
    kl = float((p * np.log(p / q)).sum())
    found = distance([scores(np.log(q[drawn]) - np.log(p[drawn]))])
    assert found.k1 == pytest.approx(kl, rel=0.02)
    assert found.k3 == pytest.approx(kl, rel=0.03)


def two_distributions(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, q and the tokens by falling p."""
    generator = np.random.default_rng(seed)
    p, q = (generator.dirichlet(np.full(30, 0.5)) + 1e-9 for _ in range(2))
    return p / p.sum(), q / q.sum(), np.argsort(-p)


def of(p: np.ndarray, q: np.ndarray, ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    rows = np.broadcast_to(ids, (len(tokens), len(ids)))
    return divergence(Top(rows, np.log(p[rows])), np.log(q[rows]), tokens, np.log(q[tokens] / p[tokens]))


@given(st.integers(0, 2**32 - 1), st.integers(1, 29))
def test_the_divergence_of_the_most_probable_tokens_alone_is_a_lower_bound(seed: int, kept: int) -> None:
    p, q, order = two_distributions(seed)
    whole = float((p * np.log(p / q)).sum())
    likely, unlikely = order[:1], order[-1:]
    assert of(p, q, order, unlikely)[0] == pytest.approx(whole, abs=1e-5)
    assert -1e-5 <= of(p, q, order[:kept], likely)[0] <= of(p, q, order[: kept + 1], likely)[0] + 1e-5 <= whole + 2e-5
    # Where a token outside was sampled, what is added for it is never negative.
    assert of(p, q, order[:kept], unlikely)[0] >= of(p, q, order[:kept], likely)[0]


@pytest.mark.parametrize("kept", [1, 3, 10])
def test_sampled_tokens_make_up_for_those_that_are_not_kept(kept: int) -> None:
    p, q, order = two_distributions(7)
    q = 0.5 * p + 0.5 * q
    whole = float((p * np.log(p / q)).sum())
    drawn = np.random.default_rng(0).choice(30, size=200_000, p=p)
    found = of(p, q, order[:kept], drawn)
    assert found.mean() == pytest.approx(whole, abs=4 * found.std() / len(drawn) ** 0.5)
    assert of(p, q, order[:kept], order[:1])[0] < 0.95 * whole


def test_a_token_of_no_probability_adds_nothing() -> None:
    top = Top(np.array([[3, 4]]), np.array([[0.0, -np.inf]]))
    found = divergence(top, np.log([[0.5, 0.25]]), np.array([3]), np.array([0.0]))
    assert found[0] == pytest.approx(math.log(2))


def test_tied_tokens_are_all_most_probable() -> None:
    top = Top(np.array([[7, 8, 9]]), np.array([[-1.0, -1.0, -2.0]]))
    for trainer, agrees in (([-0.5, -1, -2], True), ([-1, -0.5, -2], True), ([-2, -2, -0.5], False)):
        assert same_top(top, np.array([trainer], dtype=np.float64), np.array([-0.5]))[0] == agrees
    assert not same_top(top, np.array([[-1.0, -1.0, -1.0]]), np.array([-0.5]))[0]


def test_the_interval_covers_the_mean_and_shrinks_with_more_rollouts() -> None:
    generator = np.random.default_rng(1)
    few = distance([scores(generator.normal(size=16)) for _ in range(5)]).intervals["abs_delta"]
    many_scores = [scores(generator.normal(size=16)) for _ in range(200)]
    many = distance(many_scores).intervals["abs_delta"]
    assert many.low < distance(many_scores).abs_delta < many.high
    assert many.high - many.low < few.high - few.low
    assert distance(many_scores[:1]).intervals == {}


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [scores([])],
        [scores([math.nan])],
        [scores([0.0], [math.inf])],
        [scores([[0.0]])],
        [scores([0.0], [0.0, 1.0])],
        [scores([0.0], None, [True, False])],
    ],
)
def test_what_cannot_be_compared_is_refused(bad: list[Scores]) -> None:
    with pytest.raises(ValueError, match="scores"):
        distance(bad)
