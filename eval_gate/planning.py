"""How many queries and repeats a margin needs, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from eval_gate.pilot import Variance
from eval_gate.stats.floor import queries_needed
from eval_gate.stats.sample_size import sample_size
from eval_gate.stats.sequential import Shape, critical_values, stopping
from trace_serve.errors import ConfigError


class Plan(BaseModel):
    """One choice of repeats.

    Attributes:
        queries: needed at most, all suites together.
        suites: the same for each suite.
        expected_queries: with looks, about as many are asked on average at the expected gap.
        requests: of both arms together at most.
        tokens: of both arms together at most; None where unknown.
    """

    model_config = ConfigDict(frozen=True)

    repeats: int
    queries: int
    suites: dict[str, int]
    expected_queries: int
    requests: int
    tokens: int | None


class Plans(BaseModel):
    """What `eval-gate plan` answers; the cheapest choice first in `cheapest`.

    Attributes:
        margin: as of the policy: points, or a share of the training arm's pass rate.
        power: wanted probability that every suite passes.
        suite_power: probability that each passes, 1 - (1 - power) / suites, so that all do with `power` at least.
        variances: by suite.
    """

    model_config = ConfigDict(frozen=True)

    margin: float
    margin_kind: Literal["absolute", "relative"]
    alpha: float
    power: float
    suite_power: float
    expected_gap: float
    looks: int
    spending: Shape
    variances: dict[str, Variance]
    plans: tuple[Plan, ...]
    cheapest: int


def plan_runs(
    variances: Mapping[str, Variance],
    *,
    margin: float,
    alpha: float,
    power: float,
    margin_kind: Literal["absolute", "relative"] = "absolute",
    expected_gap: float = 0.0,
    looks: int = 1,
    spending: Shape = "obf",
    repeats: Sequence[int] = (1, 2, 4, 8),
) -> Plans:
    """Queries of each suite for each number of repeats, and the choice with the fewest requests.

    A relative margin r is the margin r p_A for the difference (1 - r) p_A - p_B, whose variance `variances` must hold.

    Args:
        variances: by suite; every suite has to pass, each at alpha.
        expected_gap: true loss in points at which every suite should pass.

    Raises:
        ConfigError: the margin, alpha, power or expected gap cannot be planned for.
    """
    margins = {suite: _margin(suite, found, margin, margin_kind) for suite, found in variances.items()}
    _check(margin, min(margins.values()), alpha, power, expected_gap)
    suite_power = 1 - (1 - power) / len(variances)
    inflation, stops = _cost_of_looks(alpha, suite_power, looks, spending)
    # A run ends at the first look at which every suite passes.
    ended = [done ** len(variances) for done in np.cumsum(stops)]
    used = 1 - sum(ended[:-1]) / looks
    plans = []
    for count in repeats if all(found.within is not None for found in variances.values()) else (1,):
        sizes = {}
        for suite, found in variances.items():
            needed = sample_size(
                found.of(count) * found.design_effect, margins[suite], alpha, suite_power, expected_gap
            )
            # The floor counts independent queries, so with clusters as many more are needed.
            floor = math.ceil(queries_needed(margins[suite], alpha) * found.cluster_size)
            sizes[suite] = max(math.ceil(needed * inflation), floor)
        queries = sum(sizes.values())
        tokens = [None if (each := variances[suite].tokens) is None else size * each for suite, size in sizes.items()]
        plans.append(
            Plan(
                repeats=count,
                queries=queries,
                suites=sizes,
                expected_queries=min(queries, math.ceil(queries * used)),
                requests=2 * count * queries,
                tokens=None if None in tokens else math.ceil(count * sum(each or 0.0 for each in tokens)),
            )
        )
    best = min(range(len(plans)), key=lambda index: (plans[index].requests, plans[index].queries))
    return Plans(
        margin=margin,
        margin_kind=margin_kind,
        alpha=alpha,
        power=power,
        suite_power=suite_power,
        expected_gap=expected_gap,
        looks=looks,
        spending=spending,
        variances=dict(variances),
        plans=tuple(plans),
        cheapest=best,
    )


def _cost_of_looks(alpha: float, power: float, looks: int, spending: Shape) -> tuple[float, tuple[float, ...]]:
    """How many times the queries of one look are needed at most, and the probability of stopping at each look."""
    if looks == 1:
        return 1.0, (power,)
    from scipy.optimize import brentq

    fractions = tuple((look + 1) / looks for look in range(looks))
    bounds = critical_values(fractions, alpha, spending)
    single = float(
        brentq(lambda drift: sum(stopping((1.0,), critical_values((1.0,), alpha, spending), 1, drift)) - power, 0, 12)
    )
    drift = float(brentq(lambda value: sum(stopping(fractions, bounds, 1, value)) - power, 0, 12))
    return (drift / single) ** 2, stopping(fractions, bounds, 1, drift)


def _margin(suite: str, found: Variance, margin: float, kind: Literal["absolute", "relative"]) -> float:
    """The margin in points."""
    if kind == "absolute":
        return margin
    if not found.pass_rate:
        raise ConfigError(
            f"--margin-kind relative: suite {suite}: the training arm's pass rate is {found.pass_rate}, "
            "which has no share to lose",
            field="margin_kind",
        )
    return margin * found.pass_rate


def _check(margin: float, points: float, alpha: float, power: float, expected_gap: float) -> None:
    for name, value, low, high in (("margin", margin, 0, 1), ("alpha", alpha, 0, 0.5), ("power", power, 0, 1)):
        if not low < value < high:
            raise ConfigError(f"--{name} {value:g}: expected a number between {low} and {high}", field=name)
    if not -1 < expected_gap < points:
        raise ConfigError(
            f"--expected-gap {expected_gap:g}: expected less than the margin of {points:g}, or no run can pass",
            field="expected_gap",
        )
