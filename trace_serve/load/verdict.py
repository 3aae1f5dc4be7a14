"""Whether a run may be judged at all, and whether it met its SLO."""

from __future__ import annotations

from pydantic import BaseModel

from trace_serve.load.exchange import Outcome
from trace_serve.load.plan import LoadPlan
from trace_serve.load.slo import Slo, percent
from trace_serve.load.totals import Totals


class Check(BaseModel):
    """One limit: `measured` has to be at most `limit`, or at least where `at_least`."""

    name: str
    limit: float
    measured: float | None
    at_least: bool = False
    met: bool


def invalid_reasons(plan: LoadPlan, slo: Slo, totals: Totals, silent_workers: int) -> list[str]:
    """Why the figures mean nothing; empty when they do."""
    reasons = []
    answered = totals.outcomes[Outcome.OK]
    if answered < slo.run.min_requests:
        reasons.append(f"{answered} requests were answered, expected at least {slo.run.min_requests}")
    if silent_workers:
        reasons.append(f"{silent_workers} load processes did not report their end: stopped early, or lost")
    lag_s = totals.latencies.quantile("lag", 99.0)
    if plan.is_open and lag_s > plan.max_lag:
        reasons.append(
            f"p99 of sent minus scheduled is {lag_s * 1000:.0f} ms, expected at most {plan.max_lag * 1000:.0f}: the "
            "load generator was too slow for its schedule; give it more --processes or a quieter machine"
        )
    return reasons


def check_slo(slo: Slo, totals: Totals, offered: int, wall_s: float) -> list[Check]:
    """Every limit of the SLO with what was measured; a percentile without values is not met."""
    run, count = slo.run, max(offered, 1)
    failed = sum(totals.outcomes[each] for each in (Outcome.FAILED, Outcome.REFUSED, Outcome.UNFINISHED))
    checks = [
        _at_most("error share", run.max_error_share, failed / count),
        _at_most("dropped share", run.max_dropped_share, totals.outcomes[Outcome.DROPPED] / count),
    ]
    if totals.sums["hint_faults"]:
        checks.append(_at_most("hint files that did not come", 0, totals.sums["hint_faults"]))
    if run.min_goodput is not None:
        plain = max(totals.clients["plain"], 1)
        checks.append(_at_least("goodput", run.min_goodput, totals.sums["good"] / plain))
    if run.min_tokens_per_s is not None:
        checks.append(_at_least("tokens/s", run.min_tokens_per_s, totals.sums["completion_tokens"] / wall_s))
    for latency, name, limit in slo.percentile_limits():
        metric = slo.metric(latency)
        empty = not totals.latencies.count(metric)
        latencies = totals.latencies
        seconds = latencies.mean(metric) if name == "mean" else latencies.quantile(metric, percent(name))
        checks.append(_at_most(f"{latency.upper()} {name} ms", limit, None if empty else seconds * 1000))
    return checks


def _at_most(name: str, limit: float, measured: float | None) -> Check:
    return Check(name=name, limit=limit, measured=measured, met=measured is not None and measured <= limit)


def _at_least(name: str, limit: float, measured: float) -> Check:
    return Check(name=name, limit=limit, measured=measured, at_least=True, met=measured >= limit)
