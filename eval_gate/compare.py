"""Turns pairs into a gap with confidence bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval_gate.pairing import Pair
from eval_gate.policy import GatePolicy
from eval_gate.stats import mcnemar
from eval_gate.stats.clustered import fixed_set_standard_error, paired_difference
from eval_gate.stats.floor import zero_discordance_floor
from eval_gate.stats.rule import with_floor
from eval_gate.stats.table import Interval, PairedTable, two_sided_z
from eval_gate.stats.tango import tango_interval
from eval_gate.verdict import Comparison


def method_name(pairs: Sequence[Pair], policy: GatePolicy) -> str:
    """How `compare` computes the bounds for these pairs, in words."""
    confidence = f"{100 * (1 - 2 * policy.alpha):g}%"
    if policy.mode == "fixed-set":
        return f"{confidence} normal interval over resampling of these queries"
    if policy.repeats == 1 and not _clustered(pairs):
        return f"{confidence} Tango score interval"
    return f"{confidence} t interval of the paired difference, standard error by cluster"


def compare(pairs: Sequence[Pair], policy: GatePolicy) -> Comparison:
    """Gap and bounds of a group of queries.

    An unscored query is left out of the gap but not of the bounds: the upper bound takes it as lost, the lower bound
    as gained, so neither PASS nor BLOCK can come from what was not measured.
    """
    scored = [pair for pair in pairs if pair.scored]
    table = PairedTable.from_pairs((pair.training_rate > 0.5, pair.serving_rate > 0.5) for pair in scored)
    floor = zero_discordance_floor(independent_units(scored), policy.alpha)
    worst = with_floor(bounds(pairs, policy, unscored=1.0), floor)
    best = bounds(pairs, policy, unscored=-1.0)
    differences = [pair.difference for pair in scored]
    return Comparison(
        n=len(pairs),
        scored=len(scored),
        training_pass_rate=_mean([pair.training_rate for pair in scored]),
        serving_pass_rate=_mean([pair.serving_rate for pair in scored]),
        gap=_mean(differences),
        lower=best.lower,
        upper=worst.upper,
        both=table.both,
        only_training=table.only_a,
        only_serving=table.only_b,
        neither=table.neither,
        mcnemar_exact_p=mcnemar.exact(table.only_a, table.only_b) if scored else None,
    )


def bounds(pairs: Sequence[Pair], policy: GatePolicy, *, unscored: float) -> Interval:
    """Confidence interval of the gap with every unscored query's difference set to `unscored` (1 or -1)."""
    confidence = 1 - 2 * policy.alpha
    differences = [pair.difference if pair.scored else unscored for pair in pairs]
    if policy.mode == "fixed-set":
        scored = [pair for pair in pairs if pair.scored]
        error = fixed_set_standard_error(
            [pair.training_rate for pair in scored],
            [pair.serving_rate for pair in scored],
            policy.repeats,
            policy.repeats,
        )
        middle = _mean(differences)
        reach = two_sided_z(confidence) * error
        return Interval(middle - reach, middle + reach)
    if policy.repeats == 1 and not _clustered(pairs):
        table = PairedTable(
            both=sum(pair.scored and pair.training_rate + pair.serving_rate == 2 for pair in pairs),
            only_a=sum(difference == 1 for difference in differences),
            only_b=sum(difference == -1 for difference in differences),
            neither=sum(pair.scored and pair.training_rate + pair.serving_rate == 0 for pair in pairs),
        )
        return tango_interval(table, confidence)
    clusters = [pair.query.cluster or f"query:{pair.query.id}" for pair in pairs]
    return paired_difference(differences, clusters).interval(confidence)


def independent_units(pairs: Sequence[Pair]) -> int:
    """Queries, or clusters of queries where clusters are declared."""
    return len({pair.query.cluster or f"query:{pair.query.id}" for pair in pairs})


def _clustered(pairs: Sequence[Pair]) -> bool:
    return independent_units(pairs) < len(pairs)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
