"""Holds each suite's bounds against the margin: all suites must pass, and chance may block none of them (Holm)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eval_gate.compare import compare, lower_bound, margin_in_effect
from eval_gate.looks import Unit
from eval_gate.outcomes import Outcomes
from eval_gate.policy import GatePolicy
from eval_gate.stats.holm import holm
from eval_gate.stats.rule import Outcome, decide_interval, decide_point
from eval_gate.stats.sequential import nominal_levels
from eval_gate.stats.table import Interval
from eval_gate.verdict import Comparison, SuiteResult


@dataclass(frozen=True)
class Design:
    """When each suite is looked at, and so how much of an error rate each look may use.

    Attributes:
        units: for each suite, independent queries up to each planned look.
    """

    units: Mapping[str, tuple[int, ...]]
    policy: GatePolicy

    @classmethod
    def of(cls, parts: Sequence[Sequence[Unit]], policy: GatePolicy) -> Design:
        """The design of a schedule (see `looks.schedule`)."""
        seen: dict[str, set[object]] = {query.suite: set() for part in parts for query in part}
        units: dict[str, list[int]] = {suite: [] for suite in seen}
        for part in parts:
            for query in part:
                seen[query.suite].add(query.cluster or ("", query.id))
            for suite, found in seen.items():
                units[suite].append(len(found))
        return cls({suite: tuple(counts) for suite, counts in units.items()}, policy)

    def level(self, look: int, alpha: float, suite: str | None = None) -> float:
        """One-sided level of look number `look` (from 0) out of `alpha` over all looks; None is all suites together."""
        if suite is not None:
            counts = self.units[suite]
        else:
            counts = tuple(sum(numbers) for numbers in zip(*self.units.values(), strict=True))
        fractions = tuple(count / counts[-1] for count in counts)
        return nominal_levels(fractions, alpha, self.policy.spending)[look]


def rule_suites(suites: Mapping[str, Outcomes], design: Design, look: int) -> tuple[SuiteResult, ...]:
    """The result of every suite at one look, by name.

    PASS of the whole needs PASS of every suite, each at alpha (intersection-union: no correction is needed). BLOCK
    needs one suite that blocks, so the lower bounds are held against the margin at Holm's levels.

    Source: R. L. Berger, Technometrics 24 (1982) 295-300; S. Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    policy = design.policy
    names = sorted(suites)
    blocked = holm([_blocks(suites[name], design, look, name) for name in names], policy.alpha)
    results = []
    for name, found in zip(names, blocked, strict=True):
        level = design.level(look, policy.alpha, name)
        block_level = design.level(look, found.level, name)
        comparison = compare(suites[name], policy, level=level, block_level=block_level)
        results.append(
            SuiteResult(
                suite=name,
                outcome=_outcome(policy, comparison),
                comparison=comparison,
                level=level,
                block_level=block_level,
            )
        )
    return tuple(results)


def overall_outcome(suites: Sequence[SuiteResult]) -> Outcome:
    """BLOCK if any suite blocks, PASS if all pass."""
    outcomes = {suite.outcome for suite in suites}
    if Outcome.BLOCK in outcomes:
        return Outcome.BLOCK
    return Outcome.PASS if outcomes == {Outcome.PASS} else Outcome.INCONCLUSIVE


def _blocks(outcomes: Outcomes, design: Design, look: int, suite: str) -> Callable[[float], bool]:
    scored = outcomes.training[outcomes.scored]
    margin = margin_in_effect(design.policy, float(scored.mean()) if len(scored) else math.nan)
    return lambda alpha: lower_bound(outcomes, design.policy, design.level(look, alpha, suite)) > margin


def _outcome(policy: GatePolicy, found: Comparison) -> Outcome:
    if found.gap is None or found.lower is None or found.upper is None or found.margin is None:
        return Outcome.INCONCLUSIVE
    if policy.rule == "point":
        return decide_point(found.gap, found.margin)
    return decide_interval(Interval(found.lower, found.upper), found.margin)
