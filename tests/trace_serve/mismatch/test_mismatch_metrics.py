"""Distances between log-probabilities, against values worked out by hand and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trace_serve.mismatch.metrics import distance
from trace_serve.mismatch.variants import PROBES, VARIANTS
from trace_serve.recipe import Recipe

LOGPROBS = arrays(np.float64, st.integers(1, 40), elements=st.floats(-12, 0))


def test_three_tokens_by_hand() -> None:
    found = distance(np.log([0.5, 0.2, 0.9]), np.log([0.25, 0.2, 0.1]))
    assert found.tokens == 3
    assert found.abs_delta == pytest.approx((math.log(2) + 0 + math.log(9)) / 3)
    assert found.k1 == pytest.approx(-(math.log(2) + math.log(9)) / 3)
    assert found.k3 == pytest.approx(((2 - 1 - math.log(2)) + 0 + (9 - 1 - math.log(9))) / 3)
    assert found.ratio_max == pytest.approx(9)
    assert found.ratio_quantiles[1] == pytest.approx(2)
    assert found.clipped == pytest.approx(1 / 3)


@given(LOGPROBS)
def test_equal_sides_are_no_distance_apart(values: np.ndarray) -> None:
    found = distance(values, values.copy())
    assert (found.abs_delta, found.k1, found.k3, found.clipped) == (0, 0, 0, 0)
    assert found.ratio_quantiles == (1, 1, 1)


@given(LOGPROBS, st.integers(0, 2**32 - 1))
def test_k3_is_never_negative(values: np.ndarray, seed: int) -> None:
    other = values + np.random.default_rng(seed).normal(size=values.shape)
    assert distance(other, values).k3 >= 0


def test_k3_estimates_the_divergence_of_two_distributions() -> None:
    generator = np.random.default_rng(0)
    p, q = generator.dirichlet(np.ones(20)), generator.dirichlet(np.ones(20))
    p, q = 0.7 * p + 0.3 * q, q
    drawn = generator.choice(20, size=200_000, p=p)
    kl = float((p * np.log(p / q)).sum())
    found = distance(np.log(q[drawn]), np.log(p[drawn]))
    assert found.k1 == pytest.approx(kl, rel=0.02)
    assert found.k3 == pytest.approx(kl, rel=0.03)


@pytest.mark.parametrize(
    ("own", "other"), [([], []), ([0.0], [0.0, 0.0]), ([-math.inf], [0.0]), ([0.0], [math.nan]), ([[0.0]], [[0.0]])]
)
def test_what_cannot_be_compared_is_refused(own: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match="log-probabilities"):
        distance(np.array(own, dtype=np.float64), np.array(other, dtype=np.float64))


def test_variants_guide_the_layers_they_name() -> None:
    by_key = {variant.key: variant for variant in (*VARIANTS, *PROBES)}
    assert len(by_key) == len(VARIANTS) + len(PROBES)
    assert list(by_key["trace"].layers(30)) == list(range(30))
    assert list(by_key["trace_deeper_half"].layers(30)) == list(range(15, 30))
    assert list(by_key["skip_first_0.25"].layers(40)) == list(range(10, 40))
    assert list(by_key["skip_last_0.25"].layers(40)) == list(range(30))


def test_variants_quantize_what_they_name() -> None:
    rollout = Recipe(k_rotation=16, expert_rotation=16)
    by_key = {variant.key: variant for variant in VARIANTS}
    assert by_key["bf16"].recipe(rollout) is None
    assert by_key["trace"].recipe(rollout) == by_key["qat_no_r3"].recipe(rollout) == rollout
    weights_only = by_key["qarl"].recipe(rollout)
    assert weights_only is not None
    assert (weights_only.experts, weights_only.kv, weights_only.expert_rotation) == ("w4a16", "bf16", 16)
