"""How often chance passes a bad policy or blocks a good one, when the true loss lies exactly on the margin.

Every run is judged by the functions that the gate itself uses, so their error rate is what is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import pytest

from eval_gate.compare import lower_bound, upper_bound
from eval_gate.outcomes import Outcomes
from eval_gate.policy import GatePolicy
from eval_gate.stats.holm import holm
from eval_gate.stats.relative import contrast_score
from eval_gate.stats.sequential import nominal_levels
from eval_gate.stats.table import PairedTable

RUNS = 2000
MARGIN = 0.05
ALPHA = 0.05
# Three standard errors of a share of `ALPHA` in `RUNS` runs.
TOLERANCE = 3 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


@dataclass(frozen=True)
class Setting:
    """Losses and gains as shares of queries; half of the clusters have 0.4 times as many, the others 1.6 times."""

    queries: int
    repeats: int
    cluster: int
    losses: float
    gains: float

    def draw(self, rng: np.random.Generator) -> Outcomes:
        groups = self.queries // self.cluster
        factor = rng.choice([0.4, 1.6], size=groups) if self.cluster > 1 else np.ones(groups)
        factor = np.repeat(factor, self.cluster)
        clusters = np.repeat(np.arange(groups), self.cluster)
        at = rng.random(self.queries)
        # With repeats a lost query falls from a pass rate of 3/4 to 1/4, and there are twice as many of them.
        share = 1 if self.repeats == 1 else 2
        lost = at < share * self.losses * factor
        gained = ~lost & (at < share * (self.losses + self.gains) * factor)
        if self.repeats == 1:
            same = (rng.random(self.queries) < 0.6).astype(np.float64)
            return Outcomes(
                np.where(lost, 1.0, np.where(gained, 0.0, same)),
                np.where(lost, 0.0, np.where(gained, 1.0, same)),
                clusters,
            )
        same = np.where(rng.random(self.queries) < 0.6, 0.95, 0.1)
        a = rng.binomial(self.repeats, np.where(lost, 0.75, np.where(gained, 0.25, same)))
        b = rng.binomial(self.repeats, np.where(lost, 0.25, np.where(gained, 0.75, same)))
        return Outcomes(a / self.repeats, b / self.repeats, clusters)


SETTINGS = {
    f"{'clusters of 4' if cluster > 1 else 'alone'}, k={repeats}, {100 * losses:g}% lost": Setting(
        400, repeats, cluster, losses, losses - MARGIN
    )
    for repeats in (1, 4)
    for cluster in (1, 4)
    for losses in (0.12, 0.07)
}


def judged(setting: Setting, looks: int, spending: Literal["obf", "pocock"]) -> tuple[float, float]:
    """Shares of runs that pass and that block."""
    policy = GatePolicy(margin=MARGIN, repeats=setting.repeats, looks=looks, spending=spending)
    levels = nominal_levels(tuple((look + 1) / looks for look in range(looks)), ALPHA, spending)
    bounds = _remembered(policy) if setting.repeats == setting.cluster == 1 else _bounds(policy)
    rng = np.random.default_rng(20260)
    passed = blocked = 0
    for _ in range(RUNS):
        outcomes = setting.draw(rng)
        for look, level in enumerate(levels, start=1):
            upper, lower = bounds(outcomes.take(np.arange(setting.queries * look // looks)), level)
            if upper < MARGIN or lower > MARGIN:
                passed += upper < MARGIN
                blocked += lower > MARGIN
                break
    return passed / RUNS, blocked / RUNS


def _bounds(policy: GatePolicy) -> Callable[[Outcomes, float], tuple[float, float]]:
    return lambda outcomes, level: (upper_bound(outcomes, policy, level), lower_bound(outcomes, policy, level))


def _remembered(policy: GatePolicy) -> Callable[[Outcomes, float], tuple[float, float]]:
    """Independent binary pairs with the same counts have the same bounds."""

    @cache
    def by_counts(lost: int, gained: int, n: int, level: float) -> tuple[float, float]:
        a = np.repeat([1.0, 0.0, 1.0], [lost, gained, n - lost - gained])
        b = np.repeat([0.0, 1.0, 1.0], [lost, gained, n - lost - gained])
        return _bounds(policy)(Outcomes(a, b, np.arange(n)), level)

    def find(outcomes: Outcomes, level: float) -> tuple[float, float]:
        lost = int((outcomes.training > outcomes.serving).sum())
        return by_counts(lost, int((outcomes.training < outcomes.serving).sum()), len(outcomes), level)

    return find


@pytest.mark.parametrize(("looks", "spending"), [(1, "obf"), (4, "obf"), (4, "pocock")])
@pytest.mark.parametrize("name", SETTINGS)
def test_at_the_margin_chance_decides_no_more_often_than_alpha(
    name: str, looks: int, spending: Literal["obf", "pocock"]
) -> None:
    passed, blocked = judged(SETTINGS[name], looks, spending)
    assert passed <= ALPHA + TOLERANCE
    assert blocked <= ALPHA + TOLERANCE


def test_the_settings_lose_exactly_the_margin() -> None:
    rng = np.random.default_rng(1)
    for setting in SETTINGS.values():
        drawn = [setting.draw(rng) for _ in range(300)]
        gap = float(np.mean([(one.training - one.serving).mean() for one in drawn]))
        assert gap == pytest.approx(MARGIN, abs=0.006)


@pytest.mark.parametrize("spending", ["obf", "pocock"])
def test_looks_save_half_of_the_queries_of_a_loss_of_three_margins(spending: Literal["obf", "pocock"]) -> None:
    setting = Setting(773, 1, 1, 0.16, 0.01)
    looks = 8
    policy = GatePolicy(margin=MARGIN, looks=looks, spending=spending)
    levels = nominal_levels(tuple((look + 1) / looks for look in range(looks)), ALPHA, spending)
    bounds = _remembered(policy)
    rng = np.random.default_rng(7)
    used = blocked = 0
    for _ in range(RUNS):
        outcomes = setting.draw(rng)
        for look, level in enumerate(levels, start=1):
            reached = setting.queries * look // looks
            if bounds(outcomes.take(np.arange(reached)), level)[1] > MARGIN:
                blocked += 1
                break
        used += reached
    assert blocked / RUNS > 0.99
    assert used / RUNS < 0.5 * setting.queries


def test_a_relative_margin_errs_no_more_often_than_alpha() -> None:
    share = 0.10
    policy = GatePolicy(margin=share, margin_kind="relative")
    z = NormalDist().inv_cdf(1 - ALPHA)
    rng = np.random.default_rng(3)
    # A passes 60%, B exactly 10% less of that: 48% both, 12% only A, 6% only B.
    counts = rng.multinomial(400, [0.48, 0.12, 0.06, 0.34], size=RUNS)
    tables = [PairedTable(*map(int, row)) for row in counts]
    scores = [contrast_score(table, (-share, 1 - share, -1.0, 0.0)) for table in tables]
    assert sum(score < -z for score in scores) / RUNS <= ALPHA + TOLERANCE
    assert sum(score > z for score in scores) / RUNS <= ALPHA + TOLERANCE
    # The bounds in points decide as the score does.
    for table, score in list(zip(tables, scores, strict=True))[:20]:
        rows = [table.both, table.only_a, table.only_b, table.neither]
        outcomes = Outcomes(
            np.repeat([1.0, 1.0, 0.0, 0.0], rows), np.repeat([1.0, 0.0, 1.0, 0.0], rows), np.arange(400)
        )
        margin = share * float(outcomes.training.mean())
        assert (upper_bound(outcomes, policy, ALPHA) < margin) is (score < -z)
        assert (lower_bound(outcomes, policy, ALPHA) > margin) is (score > z)


def test_a_fixed_set_errs_no_more_often_than_alpha_over_its_own_samples() -> None:
    policy = GatePolicy(margin=MARGIN, mode="fixed-set", repeats=4)
    rng = np.random.default_rng(4)
    a = rng.uniform(0.3, 0.95, size=300)
    b = a - rng.choice([-0.05, 0.0, 0.15, 0.10], size=300)
    b += (a - b).mean() - MARGIN
    assert (a - b).mean() == pytest.approx(MARGIN)
    passed = blocked = 0
    for _ in range(RUNS):
        outcomes = Outcomes(rng.binomial(4, a) / 4, rng.binomial(4, b) / 4, np.arange(300))
        passed += upper_bound(outcomes, policy, ALPHA) < MARGIN
        blocked += lower_bound(outcomes, policy, ALPHA) > MARGIN
    assert passed / RUNS <= ALPHA + TOLERANCE
    assert blocked / RUNS <= ALPHA + TOLERANCE


def test_several_suites_together_err_no_more_often_than_alpha() -> None:
    policy = GatePolicy(margin=MARGIN)
    rng = np.random.default_rng(5)
    bounds = _remembered(policy)
    setting = Setting(300, 1, 1, 0.12, 0.07)
    equal = Setting(300, 1, 1, 0.04, 0.04)
    blocked = passed = 0
    for _ in range(RUNS):
        drawn = [setting.draw(rng) for _ in range(4)]
        tests = [lambda level, one=one: bounds(one, level)[1] > MARGIN for one in drawn]
        blocked += any(found.rejected for found in holm(tests, ALPHA))
        # One suite at the margin and one without a loss: the whole may not pass more often than the worst suite.
        passed += all(bounds(one, ALPHA)[0] < MARGIN for one in (drawn[0], equal.draw(rng)))
    assert blocked / RUNS <= ALPHA + TOLERANCE
    assert passed / RUNS <= ALPHA + TOLERANCE
