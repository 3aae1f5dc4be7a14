"""Where the variance of a comparison comes from: a pilot run's results, or a share of discordant queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from eval_gate.arms.records import Role
from eval_gate.outcomes import Outcomes
from eval_gate.pairing import ItemSet, pair_up
from eval_gate.recorded import RecordedArm, common_queries, read_arm
from eval_gate.stats.clustered import paired_difference
from eval_gate.suites.named import open_queries
from trace_serve.errors import ConfigError


class Variance(BaseModel):
    """Where the variance of one query's difference w p_A - p_B comes from; w is 1, or 1 - r under a relative margin r.

    Attributes:
        between: variance over queries that more repeats do not remove.
        within: variance of one pair of samples of the same query; None where it cannot be told apart.
        pass_rate: of the training arm; None where it is unknown and not needed.
        design_effect: clustered over unclustered variance, at least 1.
        cluster_size: queries in a cluster, on average.
        tokens: prompt and answer tokens of one sample of each arm together; None where unknown.
        source: a pilot's file, or `default`.
    """

    model_config = ConfigDict(frozen=True)

    between: float
    within: float | None
    pass_rate: float | None = None
    design_effect: float = 1.0
    cluster_size: float = 1.0
    tokens: float | None = None
    source: str

    def of(self, repeats: int) -> float:
        """Variance of one query's difference with so many samples an arm."""
        return self.between + (self.within / repeats if self.within is not None else 0.0)


def default_variance(
    discordance: float, *, weight: float = 1.0, pass_rate: float | None = None, tokens: float | None = None
) -> Variance:
    """Without a pilot: binary greedy samples of which a share `discordance` differs, half of them each way.

    With p the pass rate of both arms and q the discordance, (w a - b) is w - 1 in p - q/2 of the queries, w in q/2 and
    -1 in q/2, so that its variance is (1 - w)^2 (p - q/2) + (w^2 + 1) q/2 - ((1 - w) p)^2.

    Raises:
        ConfigError: the shares cannot be; `field` names the flag.
    """
    if not 0 <= discordance <= 1:
        raise ConfigError(f"--discordance {discordance:g}: expected a share from 0 to 1", field="discordance")
    if pass_rate is None:
        if weight != 1.0:
            raise ConfigError(
                "--margin-kind relative: needs the training arm's pass rate; give --pass-rate or --pilot",
                field="pass_rate",
            )
        return Variance(between=discordance, within=None, tokens=tokens, source="default")
    half = discordance / 2
    if not max(half, 1e-9) <= pass_rate <= 1 - half:
        raise ConfigError(
            f"--pass-rate {pass_rate:g}: with --discordance {discordance:g} expected a share above 0, from {half:g} to "
            f"{1 - half:g}",
            field="pass_rate",
        )
    lost = 1 - weight
    between = lost**2 * (pass_rate - half) + (weight**2 + 1) * half - (lost * pass_rate) ** 2
    return Variance(between=between, within=None, pass_rate=pass_rate, tokens=tokens, source="default")


def read_pilot(path: Path, queries: str | None, *, weight: float = 1.0) -> dict[str, Variance]:
    """Variance of each suite of a run's results.

    Raises:
        ConfigError: the file lacks an arm, or too little of a suite is scored.
    """
    one, two = read_arm(path, Role.TRAINING, only=True), read_arm(path, Role.SERVING, only=True)
    items: ItemSet = common_queries(one, two) if queries is None else open_queries(queries)
    repeats = max(one.repeats, two.repeats)
    suites: dict[str, list[str]] = {}
    known = [query for query in items.queries if query.id in one.queries or query.id in two.queries]
    for query in known:
        suites.setdefault(query.suite, []).append(query.id)
    found = {}
    for suite in sorted(suites):
        names = set(suites[suite])
        pairs = pair_up([query for query in known if query.suite == suite], [*one.samples, *two.samples], repeats)
        counted = [_tokens(arm, names) for arm in (one, two)]
        tokens = None if any(count is None for count in counted) else sum(count or 0.0 for count in counted)
        source = path.name if len(suites) == 1 else f"{path.name}, suite {suite}"
        found[suite] = pilot_variance(Outcomes.of(pairs), repeats, tokens, source, weight=weight)
    return found


def pilot_variance(
    outcomes: Outcomes, repeats: int, tokens: float | None, source: str, *, weight: float = 1.0
) -> Variance:
    """Components from a pilot's scored queries.

    With k samples a query, var(w p_A - p_B) = between + within / k, and within / k is estimated without bias by
    w^2 p_A (1 - p_A) / (k - 1) + p_B (1 - p_B) / (k - 1).

    Raises:
        ConfigError: fewer than 10 queries are scored.
    """
    rows = outcomes.take(outcomes.scored)
    if len(rows) < 10:
        raise ConfigError(f"{source}: {len(rows)} queries with every grade, expected at least 10", field="pilot")
    a, b = rows.training, rows.serving
    differences = weight * a - b
    total = float(np.var(differences, ddof=1))
    alone, together = paired_difference(differences), paired_difference(differences, rows.clusters)
    effect = (together.standard_error / alone.standard_error) ** 2 if alone.standard_error > 0 else 1.0
    within = None
    if repeats > 1:
        spread = float(np.mean(weight**2 * a * (1 - a) + b * (1 - b))) / (repeats - 1)
        within = min(total, spread) * repeats
    return Variance(
        between=total if within is None else total - within / repeats,
        within=within,
        pass_rate=float(a.mean()),
        design_effect=max(1.0, effect) if together.degrees_of_freedom > 0 else 1.0,
        cluster_size=len(rows) / rows.units,
        tokens=tokens,
        source=source,
    )


def _tokens(arm: RecordedArm, queries: set[str]) -> float | None:
    """Mean of prompt and answer tokens of the samples of these queries that have both."""
    sizes = [
        sample.prompt_tokens + sample.completion_tokens
        for sample in arm.samples
        if sample.query_id in queries and sample.prompt_tokens is not None and sample.completion_tokens is not None
    ]
    return sum(sizes) / len(sizes) if sizes else None
