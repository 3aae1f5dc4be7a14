"""The decision rule, and what "no difference seen" is worth."""

from __future__ import annotations

import math

import pytest

from eval_gate.stats.clustered import paired_difference
from eval_gate.stats.floor import queries_needed, zero_discordance_floor
from eval_gate.stats.rule import Outcome, decide_interval, decide_point, with_floor
from eval_gate.stats.table import Interval, PairedTable
from eval_gate.stats.tango import tango_interval


@pytest.mark.parametrize(("margin", "needed"), [(0.01, 268), (0.02, 133), (0.03, 88), (0.05, 52), (0.10, 25)])
def test_fewest_queries_that_can_pass(margin: float, needed: int) -> None:
    assert queries_needed(margin, 0.05) == needed
    assert zero_discordance_floor(needed, 0.05) < margin <= zero_discordance_floor(needed - 1, 0.05)


def test_the_floor_is_the_score_bound_of_equal_arms() -> None:
    bound = tango_interval(PairedTable(40, 0, 0, 13), 0.90).upper
    assert bound == pytest.approx(zero_discordance_floor(53, 0.05), abs=1e-12)


@pytest.mark.parametrize(
    ("lower", "upper", "outcome"),
    [
        (-0.02, 0.049, Outcome.PASS),
        (-0.02, 0.05, Outcome.INCONCLUSIVE),
        (0.05, 0.20, Outcome.INCONCLUSIVE),
        (0.051, 0.20, Outcome.BLOCK),
        (math.nan, 0.01, Outcome.INCONCLUSIVE),
        (0.2, math.nan, Outcome.INCONCLUSIVE),
        (math.nan, math.nan, Outcome.INCONCLUSIVE),
    ],
)
def test_the_rule_is_strict_and_nan_decides_nothing(lower: float, upper: float, outcome: Outcome) -> None:
    assert decide_interval(Interval(lower, upper), 0.05) is outcome


def test_the_plain_rule_blocks_only_beyond_the_margin() -> None:
    assert decide_point(0.05, 0.05) is Outcome.PASS
    assert decide_point(0.0501, 0.05) is Outcome.BLOCK
    assert decide_point(math.nan, 0.05) is Outcome.INCONCLUSIVE


def test_the_floor_raises_an_upper_bound_and_never_lowers_one() -> None:
    assert with_floor(Interval(0.0, 0.0), 0.04).upper == 0.04
    assert with_floor(Interval(0.0, 0.3), 0.04).upper == 0.3
    assert math.isnan(with_floor(Interval(0.0, 0.0), math.nan).upper)


def test_correlated_queries_widen_the_interval() -> None:
    differences = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    alone = paired_difference(differences)
    together = paired_difference(differences, ["a", "a", "b", "b", "c", "c"])
    assert together.difference == alone.difference
    assert together.standard_error > alone.standard_error
    assert together.degrees_of_freedom == 2


def test_swapping_the_arms_mirrors_the_interval() -> None:
    one, two = tango_interval(PairedTable(50, 9, 2, 30), 0.9), tango_interval(PairedTable(50, 2, 9, 30), 0.9)
    assert (one.lower, one.upper) == pytest.approx((-two.upper, -two.lower), abs=1e-12)
