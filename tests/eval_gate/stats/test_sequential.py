"""Bounds for several looks, Holm's procedure and the relative loss."""

from __future__ import annotations

import itertools
import math

import pytest

from eval_gate.stats.holm import holm
from eval_gate.stats.relative import contrast_score, relative_loss_interval
from eval_gate.stats.sample_size import power_of, sample_size
from eval_gate.stats.sequential import Shape, critical_values, crossing_probability, nominal_levels
from eval_gate.stats.table import PairedTable
from eval_gate.stats.tango import score, tango_interval

EQUAL = {looks: tuple((look + 1) / looks for look in range(looks)) for looks in (1, 2, 3, 5)}


@pytest.mark.parametrize(("looks", "pocock", "obf"), [(2, 2.1783, 1.9774), (3, 2.2895, 2.0040), (5, 2.4132, 2.0401)])
def test_published_constants(looks: int, pocock: float, obf: float) -> None:
    assert round(critical_values(EQUAL[looks], 0.05, "pocock", 2)[-1], 4) == pocock
    assert round(critical_values(EQUAL[looks], 0.05, "obf", 2)[-1], 4) == obf


def test_o_brien_fleming_falls_with_the_root_of_information() -> None:
    values = critical_values((0.2, 0.5, 1.0), 0.05, "obf")
    assert values[0] / values[2] == pytest.approx(math.sqrt(5))
    assert values[1] / values[2] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("shape", ["obf", "pocock"])
@pytest.mark.parametrize("fractions", [(1.0,), (0.1, 1.0), (0.3, 0.35, 0.9), EQUAL[5]])
def test_bounds_spend_exactly_alpha(shape: Shape, fractions: tuple[float, ...]) -> None:
    assert crossing_probability(fractions, critical_values(fractions, 0.05, shape)) == pytest.approx(0.05, abs=1e-9)


def test_two_looks_agree_with_the_bivariate_normal() -> None:
    from scipy.stats import multivariate_normal

    root = math.sqrt(0.5)
    stay = multivariate_normal.cdf([2.0, 1.8], mean=[0, 0], cov=[[1, root], [root, 1]])
    assert crossing_probability((0.5, 1.0), (2.0, 1.8)) == pytest.approx(1 - stay, abs=1e-6)


def test_one_look_tests_at_alpha_itself() -> None:
    assert nominal_levels((1.0,), 0.05, "obf") == (0.05,)


@pytest.mark.parametrize("fractions", [(), (0.0, 1.0), (0.5, 0.5), (0.7, 0.3)])
def test_fractions_must_rise(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="information fractions"):
        critical_values(fractions, 0.05, "obf")


def test_holm_steps_down_and_stops() -> None:
    def with_p(p: float):
        return lambda level: p <= level

    assert [found.rejected for found in holm([with_p(p) for p in (0.02, 0.012, 0.04)], 0.05)] == [True, True, True]
    found = holm([with_p(p) for p in (0.03, 0.012, 0.04)], 0.05)
    assert [one.rejected for one in found] == [False, True, False]
    assert [one.level for one in found] == pytest.approx([0.025, 0.05 / 3, 0.025])
    assert not any(one.rejected for one in holm([with_p(0.02)] * 3, 0.05))
    assert holm([], 0.05) == []


@pytest.mark.parametrize(
    ("discordant", "sizes"),
    [
        (0.05, (3092, 773, 344, 124)),
        (0.10, (6183, 1546, 687, 248)),
        (0.20, (12366, 3092, 1374, 495)),
    ],
)
def test_published_sample_sizes(discordant: float, sizes: tuple[int, ...]) -> None:
    assert tuple(sample_size(discordant, margin, 0.05, 0.80) for margin in (0.01, 0.02, 0.03, 0.05)) == sizes


def test_power_is_what_the_size_was_computed_for() -> None:
    assert power_of(773, 0.05, 0.02, 0.05) == pytest.approx(0.80, abs=1e-3)
    assert power_of(51, 0.0, 0.05, 0.05) == 0.0
    assert power_of(52, 0.0, 0.05, 0.05) == 1.0
    assert sample_size(0.0, 0.05, 0.05, 0.80) == 52
    with pytest.raises(ValueError, match="can not pass"):
        sample_size(0.1, 0.05, 0.05, 0.8, expected_gap=0.05)


def test_the_contrast_score_is_tangos_for_a_difference() -> None:
    for counts in itertools.product((0, 1, 40), (0, 1, 6), (0, 1, 7), (0, 2)):
        table = PairedTable(*counts)
        for delta in (-0.4, -0.05, 0.03, 0.3):
            weights = (-delta, 1 - delta, -1 - delta, -delta)
            if table.n:
                assert contrast_score(table, weights) == pytest.approx(score(table, delta), abs=1e-6)


def test_a_relative_loss_is_the_absolute_one_where_the_training_arm_never_fails() -> None:
    table = PairedTable(90, 10, 0, 0)
    relative, absolute = relative_loss_interval(table, 0.9), tango_interval(table, 0.9)
    assert relative.lower == pytest.approx(absolute.lower, abs=1e-3)
    assert relative.upper == pytest.approx(absolute.upper, abs=1e-3)


def test_a_relative_loss_is_larger_by_the_training_pass_rate() -> None:
    interval = relative_loss_interval(PairedTable(40, 10, 0, 50), 0.9)
    assert interval.lower < 0.2 < interval.upper
    assert math.isnan(relative_loss_interval(PairedTable(0, 0, 3, 4), 0.9).upper)
