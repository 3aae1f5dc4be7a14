"""One run's result: the only thing that terminal, JSON, CSV, HTML, search and comparison read."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trace_serve.load.exchange import Outcome
from trace_serve.load.histograms import METRICS, QUANTILES
from trace_serve.load.plan import LoadPlan
from trace_serve.load.slo import Slo
from trace_serve.load.totals import Totals
from trace_serve.load.verdict import Check, check_slo, invalid_reasons

MAX_VERSIONS = 20


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    INVALID = "invalid"

    @property
    def exit_code(self) -> int:
        return {"met": 0, "missed": 1, "invalid": 2}[self.value]


class Latency(BaseModel):
    """Milliseconds of one metric; `quantiles` by percent."""

    metric: str
    count: int
    mean: float
    quantiles: dict[str, float]
    maximum: float


class Version(BaseModel):
    """Which weights answered how many requests, by the headers x-trace-*."""

    policy: str
    digest: str
    weight_version: str
    verdict: str
    requests: int


class Swap(BaseModel):
    """One activation over the admin API; `at_s` since the run began."""

    at_s: float
    policy: str
    seconds: float
    fault: str = ""


class LoadReport(BaseModel):
    """Figures are of measured arrivals: those due after the warm-up.

    Attributes:
        wall_s: from the end of the warm-up to the last byte; rates are over it.
        good, goodput: requests within the request limits of the SLO, and their share of plain clients' arrivals.
        histograms: base64 of HdrHistogram's V2 format, microseconds.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    host: str
    plan: LoadPlan
    slo: Slo
    began: str
    processes: int
    warmup_requests: int
    offered: int
    outcomes: dict[str, int]
    clients: dict[str, int]
    reasons: dict[str, int]
    wall_s: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_s: float
    tokens_per_s: float
    good: int
    goodput: float
    goodput_per_s: float
    hint_bytes: int
    latencies: list[Latency]
    versions: list[Version]
    swaps: list[Swap]
    notes: list[str]
    checks: list[Check]
    invalid: list[str]
    verdict: Verdict
    requests_not_kept: int
    histograms: dict[str, str] = Field(repr=False)

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    def latency(self, metric: str) -> Latency | None:
        return next((each for each in self.latencies if each.metric == metric), None)


def conclude(
    plan: LoadPlan,
    slo: Slo,
    totals: Totals,
    *,
    host: str,
    began: str,
    processes: int,
    silent_workers: int,
    swaps: list[dict[str, Any]],
    notes: list[str],
    faults: list[str],
) -> LoadReport:
    """Judges a finished run.

    Args:
        totals: merged over all processes.
        silent_workers: processes that never reported their end.
        faults: what else makes the run invalid.
    """
    offered = sum(totals.outcomes.values())
    wall_s = max(totals.last_end_s - plan.warmup, 1e-9)
    answered = totals.outcomes[Outcome.OK]
    versions = [
        Version(**labels._asdict(), requests=count) for labels, count in totals.labels.most_common(MAX_VERSIONS)
    ]
    notes = [*notes, *_notes(totals)]
    failed_swaps = [f"a swap failed: {swap['policy']}: {swap['fault']}" for swap in swaps if swap["fault"]]
    notes += failed_swaps
    invalid = [*faults, *invalid_reasons(plan, slo, totals, silent_workers)]
    checks = check_slo(slo, totals, offered, wall_s)
    met = all(check.met for check in checks)
    return LoadReport(
        host=host,
        plan=plan,
        slo=slo,
        began=began,
        processes=processes,
        warmup_requests=totals.sums["warmup"],
        offered=offered,
        outcomes=dict(totals.outcomes),
        clients=dict(totals.clients),
        reasons=dict(totals.reasons.most_common()),
        wall_s=wall_s,
        prompt_tokens=totals.sums["prompt_tokens"],
        completion_tokens=totals.sums["completion_tokens"],
        requests_per_s=answered / wall_s,
        tokens_per_s=totals.sums["completion_tokens"] / wall_s,
        good=totals.sums["good"],
        goodput=totals.sums["good"] / max(totals.clients["plain"], 1),
        goodput_per_s=totals.sums["good"] / wall_s,
        hint_bytes=totals.sums["hint_bytes"],
        latencies=[_latency(totals, metric) for metric in METRICS if totals.latencies.count(metric)],
        versions=versions,
        swaps=[Swap(**swap) for swap in swaps],
        notes=notes,
        checks=checks,
        invalid=invalid,
        verdict=Verdict.INVALID if invalid else Verdict.MET if met else Verdict.MISSED,
        requests_not_kept=totals.sums["not_kept"],
        histograms=totals.latencies.encode(),
    )


def _latency(totals: Totals, metric: str) -> Latency:
    latencies = totals.latencies
    quantiles = latencies.curve(metric, QUANTILES)
    return Latency(
        metric=metric,
        count=latencies.count(metric),
        mean=latencies.mean(metric) * 1000,
        quantiles={f"{percent:g}": seconds * 1000 for percent, seconds in zip(QUANTILES, quantiles, strict=True)},
        maximum=latencies.maximum(metric) * 1000,
    )


def _notes(totals: Totals) -> list[str]:
    notes = []
    for what, name in (("policy digest", "digest"), ("weight version", "weight_version"), ("verdict", "verdict")):
        seen = {getattr(labels, name) for labels in totals.labels} - {""}
        if len(seen) > 1:
            notes.append(f"more than one {what} answered: {', '.join(sorted(seen)[:5])}; figures mix them")
    if totals.outcomes[Outcome.DROPPED]:
        notes.append(
            f"{totals.outcomes[Outcome.DROPPED]} arrivals were dropped at the cap of requests in flight; latencies are "
            "of the others alone and look better than the load was"
        )
    if totals.sums["not_kept"]:
        notes.append(f"requests.csv lacks {totals.sums['not_kept']} requests; keep more with --keep-requests")
    if totals.clients["slow"] or totals.clients["leaves"]:
        notes.append("clients that read slowly or left are in the counts, not in the latencies nor in goodput")
    return notes
