"""What a run adds up to, in one process and merged over all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from trace_serve.load.exchange import Client, Exchange, Labels, Outcome
from trace_serve.load.histograms import METRICS, Latencies
from trace_serve.load.slo import Slo

MAX_REASONS = 50
MAX_LABELS = 1000
ELSE = "other reasons"


class Totals:
    """Counts, histograms and the first requests of a run. What arrived in the warm-up is only counted.

    Args:
        warmup_s: arrivals due before it are not measured.
        slo: says which answers are good.
        keep: how many exchanges are kept one by one.
    """

    def __init__(self, warmup_s: float, slo: Slo, keep: int) -> None:
        self._warmup_s = warmup_s
        self._slo = slo
        self._keep = keep
        self.clear()

    def clear(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.clients: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.labels: Counter[Labels] = Counter()
        self.sums: Counter[str] = Counter()
        self.last_end_s = 0.0
        self.latencies = Latencies()
        self.rows: list[dict[str, Any]] = []

    def add(self, exchange: Exchange) -> None:
        if exchange.scheduled_s < self._warmup_s:
            self.sums["warmup"] += 1
            return
        self.outcomes[exchange.outcome] += 1
        self.clients[exchange.client] += 1
        if exchange.reason and exchange.outcome is not Outcome.OK:
            self._count_reason(exchange.reason)
        if exchange.hint_fault:
            self.sums["hint_faults"] += 1
            self._count_reason(f"hints: {exchange.hint_fault}")
        self.sums["prompt_tokens"] += exchange.prompt_tokens
        self.sums["completion_tokens"] += exchange.completion_tokens
        self.sums["hint_bytes"] += exchange.hint_bytes
        if any(exchange.labels) and (exchange.labels in self.labels or len(self.labels) < MAX_LABELS):
            self.labels[exchange.labels] += 1
        if exchange.end_s is not None:
            self.last_end_s = max(self.last_end_s, exchange.end_s)
        good = exchange.client is Client.PLAIN and self._slo.is_good(exchange)
        self.sums["good"] += good
        self._measure(exchange)
        if len(self.rows) < self._keep:
            self.rows.append(_row(exchange, good))
        else:
            self.sums["not_kept"] += 1

    def _measure(self, exchange: Exchange) -> None:
        """The lag of everything sent; all else of plain clients that got their whole answer."""
        lag = exchange.latency("lag")
        if lag is not None:
            self.latencies.add("lag", lag)
        if exchange.outcome is not Outcome.OK or exchange.client is not Client.PLAIN:
            return
        for metric in METRICS:
            if metric in ("lag", "itl"):
                continue
            seconds = exchange.latency(metric)
            if seconds is not None:
                self.latencies.add(metric, seconds)
        for gap in exchange.gaps_s:
            self.latencies.add("itl", gap)

    def _count_reason(self, reason: str) -> None:
        known = reason in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[reason if known else ELSE] += 1

    def to_wire(self) -> dict[str, Any]:
        """Plain values that `merge` takes in another process."""
        return {
            "outcomes": dict(self.outcomes),
            "clients": dict(self.clients),
            "reasons": dict(self.reasons),
            "labels": [[list(labels), count] for labels, count in self.labels.items()],
            "sums": dict(self.sums),
            "last_end_s": self.last_end_s,
            "latencies": self.latencies.encode(),
            "rows": self.rows,
        }

    def merge(self, wire: dict[str, Any]) -> None:
        self.outcomes.update(wire["outcomes"])
        self.clients.update(wire["clients"])
        for reason, count in wire["reasons"].items():
            self.reasons[reason] += count
        for labels, count in wire["labels"]:
            self.labels[Labels(*labels)] += count
        self.sums.update(wire["sums"])
        self.last_end_s = max(self.last_end_s, wire["last_end_s"])
        self.latencies.merge(wire["latencies"])
        room = max(self._keep - len(self.rows), 0)
        self.rows += wire["rows"][:room]
        self.sums["not_kept"] += max(len(wire["rows"]) - room, 0)


def _row(exchange: Exchange, good: bool) -> dict[str, Any]:
    row = asdict(exchange)
    gaps = row.pop("gaps_s")
    row["labels"] = list(exchange.labels)
    return {**row, "outcome": str(exchange.outcome), "client": str(exchange.client), "good": good, "events": len(gaps)}
