"""How many queries and repeats a margin needs, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from eval_gate.outcomes import Outcomes
from eval_gate.stats.clustered import paired_difference
from eval_gate.stats.floor import queries_needed
from eval_gate.stats.sample_size import sample_size
from eval_gate.stats.sequential import Shape, critical_values, stopping
from trace_serve.errors import ConfigError


class Variance(BaseModel):
    """Where the variance of one query's difference comes from.

    Attributes:
        between: variance over queries that more repeats do not remove.
        within: variance of one pair of samples of the same query; None where it cannot be told apart.
        design_effect: clustered over unclustered variance, at least 1.
        cluster_size: queries in a cluster, on average.
        tokens: prompt and answer tokens of one sample of each arm together; None where unknown.
        source: a pilot's file, or `default`.
    """

    model_config = ConfigDict(frozen=True)

    between: float
    within: float | None
    design_effect: float = 1.0
    cluster_size: float = 1.0
    tokens: float | None = None
    source: str

    def of(self, repeats: int) -> float:
        """Variance of d_i with so many samples an arm."""
        return self.between + (self.within / repeats if self.within is not None else 0.0)


class Plan(BaseModel):
    """One choice of repeats.

    Attributes:
        queries: needed at most.
        expected_queries: with looks, on average at the expected gap.
        requests: of both arms together at most.
        tokens: of both arms together at most; None where unknown.
    """

    model_config = ConfigDict(frozen=True)

    repeats: int
    queries: int
    expected_queries: int
    requests: int
    tokens: int | None


class Plans(BaseModel):
    """What `eval-gate plan` answers; the cheapest choice first in `cheapest`."""

    model_config = ConfigDict(frozen=True)

    margin: float
    alpha: float
    power: float
    expected_gap: float
    looks: int
    spending: Shape
    variance: Variance
    plans: tuple[Plan, ...]
    cheapest: int


def default_variance(discordance: float) -> Variance:
    """Without a pilot: binary greedy samples of which a share `discordance` differs, half of them each way."""
    return Variance(between=discordance, within=None, source="default")


def pilot_variance(outcomes: Outcomes, repeats: int, tokens: float | None, source: str) -> Variance:
    """Components from a pilot's scored queries.

    With k samples a query, var(d_i) = between + within / k, and within / k is estimated without bias by
    p_A (1 - p_A) / (k - 1) + p_B (1 - p_B) / (k - 1).

    Raises:
        ConfigError: fewer than 10 queries are scored.
    """
    rows = outcomes.take(outcomes.scored)
    if len(rows) < 10:
        raise ConfigError(f"{source}: {len(rows)} queries with every grade, expected at least 10", field="pilot")
    differences = rows.training - rows.serving
    total = float(np.var(differences, ddof=1))
    alone, together = paired_difference(differences), paired_difference(differences, rows.clusters)
    effect = (together.standard_error / alone.standard_error) ** 2 if alone.standard_error > 0 else 1.0
    within = None
    if repeats > 1:
        a, b = rows.training, rows.serving
        within = min(total, float(np.mean(a * (1 - a) + b * (1 - b))) / (repeats - 1)) * repeats
    return Variance(
        between=total if within is None else total - within / repeats,
        within=within,
        design_effect=max(1.0, effect) if together.degrees_of_freedom > 0 else 1.0,
        cluster_size=len(rows) / rows.units,
        tokens=tokens,
        source=source,
    )


def plan_runs(
    variance: Variance,
    *,
    margin: float,
    alpha: float,
    power: float,
    expected_gap: float = 0.0,
    looks: int = 1,
    spending: Shape = "obf",
    repeats: Sequence[int] = (1, 2, 4, 8),
) -> Plans:
    """Queries for each number of repeats, and the choice with the fewest requests.

    Raises:
        ConfigError: the margin, alpha, power or expected gap cannot be planned for.
    """
    _check(margin, alpha, power, expected_gap)
    inflation, spent = _cost_of_looks(alpha, power, looks, spending)
    plans = []
    for count in repeats if variance.within is not None else (1,):
        needed = sample_size(variance.of(count) * variance.design_effect, margin, alpha, power, expected_gap)
        # The floor counts independent queries, so with clusters as many more are needed.
        floor = math.ceil(queries_needed(margin, alpha) * variance.cluster_size)
        queries = max(math.ceil(needed * inflation), floor)
        requests = 2 * count * queries
        plans.append(
            Plan(
                repeats=count,
                queries=queries,
                expected_queries=min(queries, math.ceil(queries * spent)),
                requests=requests,
                tokens=None if variance.tokens is None else math.ceil(count * queries * variance.tokens),
            )
        )
    best = min(range(len(plans)), key=lambda index: (plans[index].requests, plans[index].queries))
    return Plans(
        margin=margin,
        alpha=alpha,
        power=power,
        expected_gap=expected_gap,
        looks=looks,
        spending=spending,
        variance=variance,
        plans=tuple(plans),
        cheapest=best,
    )


def _cost_of_looks(alpha: float, power: float, looks: int, spending: Shape) -> tuple[float, float]:
    """How many times the queries of one look are needed at most, and the share of them used on average."""
    if looks == 1:
        return 1.0, 1.0
    from scipy.optimize import brentq

    fractions = tuple((look + 1) / looks for look in range(looks))
    bounds = critical_values(fractions, alpha, spending)
    single = float(
        brentq(lambda drift: sum(stopping((1.0,), critical_values((1.0,), alpha, spending), 1, drift)) - power, 0, 12)
    )
    drift = float(brentq(lambda value: sum(stopping(fractions, bounds, 1, value)) - power, 0, 12))
    stops = stopping(fractions, bounds, 1, drift)
    used = sum(share * fraction for share, fraction in zip(stops, fractions, strict=True)) + (1 - sum(stops))
    return (drift / single) ** 2, used


def _check(margin: float, alpha: float, power: float, expected_gap: float) -> None:
    for name, value, low, high in (("margin", margin, 0, 1), ("alpha", alpha, 0, 0.5), ("power", power, 0, 1)):
        if not low < value < high:
            raise ConfigError(f"--{name} {value:g}: expected a number between {low} and {high}", field=name)
    if not -1 < expected_gap < margin:
        raise ConfigError(
            f"--expected-gap {expected_gap:g}: expected less than the margin of {margin:g}, or no run can pass",
            field="expected_gap",
        )
