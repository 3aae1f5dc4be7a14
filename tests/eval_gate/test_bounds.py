"""What must hold of the bounds for any outcomes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_gate.compare import compare, lower_bound, upper_bound
from eval_gate.outcomes import Outcomes
from eval_gate.policy import GatePolicy
from eval_gate.stats.floor import zero_discordance_floor

GRADES = st.sampled_from([0.0, 1.0])
PAIRS = st.lists(st.tuples(GRADES, GRADES), min_size=2, max_size=80)
RATES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
POLICIES = [
    {},
    {"looks": 3},
    {"margin_kind": "relative"},
    {"repeats": 4},
    {"repeats": 4, "margin_kind": "relative"},
    {"repeats": 4, "mode": "fixed-set"},
]


def outcomes(pairs: list[tuple[float, float]], clusters: int | None = None) -> Outcomes:
    numbers = np.arange(len(pairs)) if clusters is None else np.arange(len(pairs)) % clusters
    return Outcomes(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]), numbers)


@pytest.mark.parametrize("changes", POLICIES)
@given(pairs=PAIRS, rates=st.lists(st.tuples(RATES, RATES), min_size=4, max_size=60), clusters=st.integers(2, 5))
def test_the_gap_lies_between_its_bounds_and_the_floor_under_the_upper_one(
    changes: dict[str, Any], pairs: list[tuple[float, float]], rates: list[tuple[float, float]], clusters: int
) -> None:
    policy = GatePolicy(**changes)
    repeated = policy.repeats > 1
    rows = outcomes(rates if repeated else pairs, clusters if repeated and policy.mode == "population" else None)
    found = compare(rows, policy)
    assert found.gap is not None
    if found.upper is None:
        # No share of nothing.
        assert (policy.margin_kind, found.training_pass_rate) == ("relative", 0.0)
        return
    assert found.upper >= zero_discordance_floor(rows.units, policy.alpha)
    if found.lower is not None:
        assert found.lower <= found.gap + 1e-9
        assert found.gap <= found.upper + 1e-9


@given(pairs=PAIRS, missing=st.lists(st.booleans(), min_size=80, max_size=80), filling=PAIRS)
def test_a_query_without_a_grade_never_helps_to_a_decision(
    pairs: list[tuple[float, float]], missing: list[bool], filling: list[tuple[float, float]]
) -> None:
    policy = GatePolicy()
    partly = [(math.nan, b) if gone else (a, b) for (a, b), gone in zip(pairs, missing, strict=False)]
    filled = [filling[i % len(filling)] if gone else pairs[i] for i, gone in enumerate(missing[: len(pairs)])]
    unscored, whole = outcomes(partly), outcomes(filled)
    upper = upper_bound(unscored, policy, 0.05)
    assert math.isnan(upper) or upper >= upper_bound(whole, policy, 0.05) - 1e-9
    assert lower_bound(unscored, policy, 0.05) <= lower_bound(whole, policy, 0.05) + 1e-9


@given(pairs=PAIRS)
def test_one_more_loss_never_lowers_a_bound(pairs: list[tuple[float, float]]) -> None:
    policy = GatePolicy()
    place = next((index for index, pair in enumerate(pairs) if pair == (1.0, 1.0)), None)
    if place is None:
        return
    worse = [*pairs[:place], (1.0, 0.0), *pairs[place + 1 :]]
    for bound in (upper_bound, lower_bound):
        assert bound(outcomes(worse), policy, 0.05) >= bound(outcomes(pairs), policy, 0.05) - 1e-9


@given(pairs=PAIRS)
def test_a_stricter_level_never_narrows_the_bounds(pairs: list[tuple[float, float]]) -> None:
    policy = GatePolicy()
    rows = outcomes(pairs)
    assert upper_bound(rows, policy, 0.01) >= upper_bound(rows, policy, 0.05)
    assert lower_bound(rows, policy, 0.01) <= lower_bound(rows, policy, 0.05)


def test_a_single_cluster_decides_nothing() -> None:
    found = compare(Outcomes(np.ones(50), np.ones(50), np.zeros(50, dtype=np.intp)), GatePolicy())
    assert found.lower is None
    assert found.upper is None


def test_nothing_scored_decides_nothing() -> None:
    nothing = np.full(5, math.nan)
    found = compare(Outcomes(nothing, nothing, np.arange(5)), GatePolicy())
    assert (found.gap, found.upper, found.mcnemar_exact_p) == (None, None, None)
