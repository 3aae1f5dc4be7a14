"""The statistics agree with published values to the digits printed there."""

from __future__ import annotations

import math

import pytest

from eval_gate.stats import mcnemar
from eval_gate.stats.agresti_min import agresti_min_interval
from eval_gate.stats.clustered import fixed_set_standard_error, paired_difference
from eval_gate.stats.newcombe import newcombe_interval
from eval_gate.stats.table import Interval, PairedTable
from eval_gate.stats.tango import tango_interval
from eval_gate.stats.wald import wald_interval

BENTUR = PairedTable(1, 1, 7, 12)
CAVO = PairedTable(59, 6, 16, 80)
AGRESTI = PairedTable(794, 150, 86, 570)


def assert_digits(interval: Interval, lower: float, upper: float, digits: int) -> None:
    assert (round(interval.lower, digits), round(interval.upper, digits)) == (lower, upper)


@pytest.mark.parametrize(
    ("table", "confidence", "lower", "upper", "digits"),
    [
        (BENTUR, 0.95, -0.517, -0.026, 3),
        (CAVO, 0.95, -0.1240, -0.0054, 4),
        (PairedTable(43, 0, 1, 0), 0.90, -0.096, 0.037, 3),
        (PairedTable(43, 0, 1, 0), 0.95, -0.1181, 0.0594, 4),
        (PairedTable(4, 9, 3, 16), 0.95, -0.027, 0.390, 3),
        (PairedTable(53, 16, 8, 9), 0.95, -0.020, 0.207, 3),
        (PairedTable(0, 3, 0, 0), 0.95, -0.1230, 1.0, 4),
        (PairedTable(0, 0, 3, 0), 0.95, -1.0, 0.1230, 4),
    ],
)
def test_tango(table: PairedTable, confidence: float, lower: float, upper: float, digits: int) -> None:
    assert_digits(tango_interval(table, confidence), lower, upper, digits)


@pytest.mark.parametrize(
    ("table", "lower", "upper"),
    [
        (BENTUR, -0.5069, -0.0256),
        (CAVO, -0.1186, -0.0046),
        (PairedTable(36, 12, 2, 0), 0.0569, 0.3404),
        (PairedTable(20, 12, 2, 16), 0.0562, 0.3292),
        (PairedTable(18, 14, 0, 18), 0.1441, 0.3963),
        (PairedTable(54, 0, 0, 0), -0.0664, 0.0664),
        (PairedTable(53, 0, 0, 1), -0.0729, 0.0729),
        (PairedTable(30, 0, 0, 24), -0.0358, 0.0358),
        (PairedTable(0, 30, 0, 0), 0.8395, 1.0),
    ],
)
def test_newcombe_method_10(table: PairedTable, lower: float, upper: float) -> None:
    assert_digits(newcombe_interval(table, 0.95), lower, upper, 4)


@pytest.mark.parametrize(
    ("table", "lower", "upper"),
    [(BENTUR, -0.5197, -0.0517), (CAVO, -0.1184, -0.0058), (AGRESTI, 0.0213, 0.0587)],
)
def test_wald(table: PairedTable, lower: float, upper: float) -> None:
    assert_digits(wald_interval(table, 0.95), lower, upper, 4)


def test_agresti_min() -> None:
    assert_digits(agresti_min_interval(CAVO, 0.95), -0.1182, -0.0045, 4)


def test_difference_of_bentur() -> None:
    assert round(BENTUR.difference, 4) == -0.2857


@pytest.mark.parametrize(
    ("b", "c", "asymptotic", "corrected", "exact", "mid_p", "digits"),
    [
        (1, 7, 0.0339, 0.0771, 0.0703, 0.0391, 4),
        (6, 16, 0.033006, 0.055009, 0.052479, 0.034690, 6),
    ],
)
def test_mcnemar_p_values(
    b: int, c: int, asymptotic: float, corrected: float, exact: float, mid_p: float, digits: int
) -> None:
    assert round(mcnemar.asymptotic(b, c).p, digits) == asymptotic
    assert round(mcnemar.continuity_corrected(b, c).p, digits) == corrected
    assert round(mcnemar.exact(b, c), digits) == exact
    assert round(mcnemar.mid_p(b, c), digits) == mid_p


def test_mcnemar_of_the_statsmodels_example() -> None:
    plain, corrected = mcnemar.asymptotic(121, 59), mcnemar.continuity_corrected(121, 59)
    assert (round(plain.statistic, 4), f"{plain.p:.3e}") == (21.3556, "3.815e-06")
    assert (round(corrected.statistic, 4), f"{corrected.p:.3e}") == (20.6722, "5.450e-06")
    assert f"{mcnemar.exact(121, 59):.3e}" == "4.434e-06"


def test_mcnemar_of_agresti() -> None:
    plain = mcnemar.asymptotic(150, 86)
    assert (round(plain.statistic, 4), f"{plain.p:.3e}") == (17.3559, "3.099e-05")
    assert round(mcnemar.continuity_corrected(150, 86).statistic, 4) == 16.8178


def test_mcnemar_of_ten_against_two() -> None:
    assert round(mcnemar.exact(10, 2), 5) == 0.03857
    assert round(mcnemar.mid_p(10, 2), 5) == 0.02246
    assert round(mcnemar.asymptotic(10, 2).statistic, 4) == 5.3333
    corrected = mcnemar.continuity_corrected(10, 2)
    assert (round(corrected.statistic, 4), round(corrected.p, 5)) == (4.0833, 0.04331)


def test_four_samples_a_query() -> None:
    rates_a = [bits.count("1") / 4 for bits in ("1111", "1010", "0000", "1111")]
    rates_b = [bits.count("1") / 4 for bits in ("1101", "0010", "0001", "1111")]
    estimate = paired_difference([a - b for a, b in zip(rates_a, rates_b, strict=True)])
    assert estimate.difference == 0.0625
    assert round(estimate.standard_error, 6) == 0.119678
    assert_digits(estimate.interval(0.90), -0.2191, 0.3441, 4)
    assert round(fixed_set_standard_error(rates_a, rates_b, 4, 4), 5) == 0.13010


def test_nothing_measured_gives_nan_not_zero() -> None:
    empty = PairedTable(0, 0, 0, 0)
    for bound in (
        empty.difference,
        tango_interval(empty, 0.9).upper,
        newcombe_interval(empty, 0.9).lower,
        wald_interval(empty, 0.9).lower,
        agresti_min_interval(empty, 0.9).upper,
        paired_difference([]).difference,
        paired_difference([0.5]).standard_error,
        fixed_set_standard_error([1.0], [1.0], 1, 4),
    ):
        assert math.isnan(bound)
