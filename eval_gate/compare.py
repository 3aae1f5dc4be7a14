"""Turns outcomes into a gap with confidence bounds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from eval_gate.outcomes import Outcomes
from eval_gate.policy import GatePolicy
from eval_gate.stats import mcnemar
from eval_gate.stats.clustered import fixed_set_standard_error, paired_difference
from eval_gate.stats.effective import effective_score_upper
from eval_gate.stats.floor import zero_discordance_floor
from eval_gate.stats.relative import relative_loss_interval
from eval_gate.stats.rule import with_floor
from eval_gate.stats.table import Interval, two_sided_z
from eval_gate.stats.tango import tango_interval
from eval_gate.verdict import Comparison


def method_name(outcomes: Outcomes, policy: GatePolicy) -> str:
    """How `compare` computes the bounds for these outcomes, in words."""
    confidence = f"{100 * (1 - 2 * policy.alpha):g}%"
    relative = ", of the loss relative to the training pass rate" if policy.margin_kind == "relative" else ""
    looks = f"; {policy.looks} looks, {_SPENDING[policy.spending]} bounds" if policy.looks > 1 else ""
    if policy.mode == "fixed-set":
        return f"{confidence} normal interval over resampling of these queries{relative}{looks}"
    if _binary(outcomes, policy):
        kind = "score interval" if relative else "Tango score interval"
        return f"{confidence} {kind}{relative}{looks}"
    return f"{confidence} t interval of the paired difference by cluster, with a score bound above{relative}{looks}"


_SPENDING = {"obf": "O'Brien-Fleming", "pocock": "Pocock"}


def compare(
    outcomes: Outcomes, policy: GatePolicy, *, level: float | None = None, block_level: float | None = None
) -> Comparison:
    """Gap and bounds of a group of queries.

    An unscored query is left out of the gap but not of the bounds: the upper bound takes it as lost, the lower bound
    as gained, so neither PASS nor BLOCK can come from what was not measured.

    Args:
        level: one-sided level of the upper bound; None is the policy's alpha.
        block_level: one-sided level of the lower bound; None is the same.
    """
    level = policy.alpha if level is None else level
    scored = outcomes.take(outcomes.scored)
    table = outcomes.majority_table()
    training = _mean(scored.training)
    return Comparison(
        n=len(outcomes),
        scored=len(scored),
        training_pass_rate=training,
        serving_pass_rate=_mean(scored.serving),
        gap=_mean(scored.training - scored.serving),
        lower=lower_bound(outcomes, policy, level if block_level is None else block_level),
        upper=upper_bound(outcomes, policy, level),
        margin=margin_in_effect(policy, training),
        both=table.both,
        only_training=table.only_a,
        only_serving=table.only_b,
        neither=table.neither,
        mcnemar_exact_p=mcnemar.exact(table.only_a, table.only_b) if len(scored) else None,
    )


def upper_bound(outcomes: Outcomes, policy: GatePolicy, level: float) -> float:
    """Upper bound of the gap at a one-sided level, unscored queries lost, never under the zero-discordance floor.

    Under a relative margin r this and `lower_bound` bound what decides: the relative loss for binary samples, else
    (1 - r) p_A - p_B, brought to the scale of the gap at the measured training pass rate. The bound lies under r p_A
    exactly when the loss is shown to be smaller than r.
    """
    floor = zero_discordance_floor(outcomes.take(outcomes.scored).units, level)
    if policy.mode == "fixed-set":
        found = _fixed_set(outcomes, policy, level, unscored=1.0).upper
    elif _binary(outcomes, policy):
        found = _score(outcomes, policy, level, unscored=1.0).upper
    else:
        differences = np.where(outcomes.scored, outcomes.training - outcomes.serving, 1.0)
        score = effective_score_upper(differences, _clusters(outcomes), 1 - 2 * level)
        found = float(np.maximum(_by_cluster(outcomes, policy, level, unscored=1.0).upper, score))
    return with_floor(Interval(math.nan, found), floor).upper


def lower_bound(outcomes: Outcomes, policy: GatePolicy, level: float) -> float:
    """Lower bound of the gap at a one-sided level, unscored queries gained."""
    if policy.mode == "fixed-set":
        return _fixed_set(outcomes, policy, level, unscored=-1.0).lower
    if not _binary(outcomes, policy):
        return _by_cluster(outcomes, policy, level, unscored=-1.0).lower
    found = _score(outcomes, policy, level, unscored=-1.0).lower
    if policy.looks == 1:
        return found
    # Early looks ask for a far tail of few queries, where the score's lower bound alone blocks too often.
    return float(np.minimum(found, _by_cluster(outcomes, policy, level, unscored=-1.0).lower))


def margin_in_effect(policy: GatePolicy, training_pass_rate: float) -> float:
    """The margin as a difference of pass rates; a relative one is a share of the training pass rate."""
    return policy.margin * training_pass_rate if policy.margin_kind == "relative" else policy.margin


def _score(outcomes: Outcomes, policy: GatePolicy, level: float, *, unscored: float) -> Interval:
    table = outcomes.table(unscored=unscored)
    if policy.margin_kind == "absolute":
        return tango_interval(table, 1 - 2 * level)
    loss = relative_loss_interval(table, 1 - 2 * level)
    rate = _mean(outcomes.training[outcomes.scored])
    return Interval(loss.lower * rate, loss.upper * rate)


def _by_cluster(outcomes: Outcomes, policy: GatePolicy, level: float, *, unscored: float) -> Interval:
    weighted, shift, _ = _weighted(outcomes, policy, unscored)
    found = paired_difference(weighted, _clusters(outcomes)).interval(1 - 2 * level)
    return Interval(found.lower + shift, found.upper + shift)


def _fixed_set(outcomes: Outcomes, policy: GatePolicy, level: float, *, unscored: float) -> Interval:
    weighted, shift, kept = _weighted(outcomes, policy, unscored)
    rows = outcomes.take(outcomes.scored)
    error = fixed_set_standard_error(rows.training, rows.serving, policy.repeats, policy.repeats, weight_a=kept)
    middle = _mean(weighted) + shift
    reach = two_sided_z(1 - 2 * level) * error
    return Interval(middle - reach, middle + reach)


def _weighted(outcomes: Outcomes, policy: GatePolicy, unscored: float) -> tuple[NDArray[np.float64], float, float]:
    """float64 [n] whose mean decides, the shift that brings it back to the gap's scale, and A's weight in it."""
    relative = policy.margin_kind == "relative"
    kept = 1 - policy.margin if relative else 1.0
    shift = policy.margin * _mean(outcomes.training[outcomes.scored]) if relative else 0.0
    values = np.where(outcomes.scored, kept * outcomes.training - outcomes.serving, kept if unscored > 0 else -1.0)
    return values, shift, kept


def _clusters(outcomes: Outcomes) -> NDArray[np.intp] | None:
    return outcomes.clusters if outcomes.clustered else None


def _binary(outcomes: Outcomes, policy: GatePolicy) -> bool:
    return policy.repeats == 1 and not outcomes.clustered


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values) / len(values) if len(values) else math.nan
