"""What an engine says about itself at scrape time: its own Prometheus metrics, its report and its load.

The engine's metrics keep their names (`sglang:...`) and gain the labels `policy` and `engine`, so that dashboards made
for SGLang work and several engines behind one front-end stay apart. An engine that is dead, slow or writes nonsense
costs its own samples only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from trace_serve.server.engines.client import EngineClient, EngineView

PREFIX = "sglang:"
SCRAPE_S = 1.0
"""Longest wait for an engine; Prometheus itself gives up after 10 s by default."""
MAX_BYTES = 4 << 20
"""More than this from one engine is not parsed; SGLang 0.5.23 writes 70 KB."""


class EngineName(NamedTuple):
    """Labels of everything that an engine says.

    Attributes:
        policy: `name@version` of what it serves.
        engine: `local` for the one that this server runs, else host and port.
    """

    policy: str
    engine: str


LABELS = EngineName._fields


@dataclass(frozen=True)
class EngineSample:
    """One engine at one moment.

    Attributes:
        name: which one.
        text: its metrics in Prometheus text, or None when they could not be had.
        report: its `/trace/report`, or None.
        load: requests that it runs and queues, or None.
    """

    name: EngineName
    text: str | None = None
    report: dict[str, Any] | None = None
    load: tuple[float, float] | None = None


async def sample(client: EngineClient, name: EngineName, engine: EngineView | None, *, metrics: bool) -> EngineSample:
    """Asks an engine everything at once; never raises, never takes longer than `SCRAPE_S`.

    Args:
        client: HTTP to engines.
        name: labels of the samples.
        engine: None while there is none.
        metrics: whether the engine was started with metrics.
    """
    if engine is None:
        return EngineSample(name)

    async def json(path: str) -> dict[str, Any] | None:
        try:
            return await client.get_json(engine.url, engine.api_key, path, timeout_s=SCRAPE_S)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def text() -> str | None:
        try:
            return await client.get_text(
                engine.url, engine.api_key, "/metrics", timeout_s=SCRAPE_S, max_bytes=MAX_BYTES
            )
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def nothing() -> None:
        return None

    written, report, loads = await asyncio.gather(
        text() if metrics else nothing(), json("/trace/report"), json("/v1/loads?include=core")
    )
    return EngineSample(name, written, report, _load(loads))


def _load(answer: dict[str, Any] | None) -> tuple[float, float] | None:
    try:
        loads = answer["loads"] if answer else []
        if loads:
            running = sum(each["num_running_reqs"] for each in loads)
            return float(running), float(sum(each["num_waiting_reqs"] for each in loads))
    except (KeyError, TypeError, ValueError):
        pass
    return None


class EngineCollector(Collector):
    """Yields the last samples of all engines as metric families; `samples` is replaced before each rendering."""

    def __init__(self) -> None:
        self.samples: tuple[EngineSample, ...] = ()

    def collect(self) -> Iterator[Metric]:
        passed, unreadable = merge(self.samples)
        up = GaugeMetricFamily(
            "trace_serve_engine_metrics_up", "1 when the engine's own metrics could be had and read", labels=LABELS
        )
        for each in self.samples:
            up.add_metric(each.name, float(each.text is not None and each.name not in unreadable))
        yield up
        yield from _from_reports(self.samples)
        yield from passed


def merge(samples: Iterable[EngineSample]) -> tuple[list[Metric], set[EngineName]]:
    """Families of all engines with the labels of their engine on every sample, and the engines whose text is not valid.

    Names outside SGLang's prefix are left out, so that an engine can never write into the front-end's own.
    """
    families: dict[str, Metric] = {}
    unreadable: set[EngineName] = set()
    for each in samples:
        if each.text is None:
            continue
        try:
            parsed = [one for one in text_string_to_metric_families(each.text) if one.name.startswith(PREFIX)]
        except (ValueError, IndexError, KeyError):
            unreadable.add(each.name)
            continue
        for one in parsed:
            family = families.setdefault(one.name, Metric(one.name, one.documentation or one.name, one.type))
            if family.type != one.type:
                unreadable.add(each.name)
                continue
            for point in one.samples:
                family.add_sample(point.name, {**point.labels, **each.name._asdict()}, point.value)
    return list(families.values()), unreadable


_HINTS = ("written", "failed", "dropped", "expired")
_INCIDENTS = ("nonfinite", "saturated", "underflow_blocks", "capture_mismatches")


def _from_reports(samples: Iterable[EngineSample]) -> Iterator[Metric]:
    hints = CounterMetricFamily(
        "trace_serve_hint_files",
        "Hint files by what became of them; starts anew with the engine",
        labels=[*LABELS, "result"],
    )
    written = CounterMetricFamily(
        "trace_serve_hint_written_bytes",
        "Bytes of hints that were written; starts anew with the engine",
        labels=LABELS,
    )
    pending = GaugeMetricFamily(
        "trace_serve_hints_pending", "Hints that wait to be written or are being written", labels=LABELS
    )
    incidents = CounterMetricFamily(
        "trace_serve_engine_incidents",
        "Numeric incidents in the engine (values saturated, blocks underflowed, ...); starts anew with the engine",
        labels=[*LABELS, "kind"],
    )
    version = GaugeMetricFamily(
        "trace_serve_weight_version", "Weight updates that the serving weights have behind them", labels=LABELS
    )
    open_session = GaugeMetricFamily(
        "trace_serve_weight_update_open", "1 while a weight update is open and nothing is generated", labels=LABELS
    )
    quarantined = GaugeMetricFamily(
        "trace_serve_engine_quarantined",
        "1 while the engine holds half an update and refuses to generate",
        labels=LABELS,
    )
    mixed = CounterMetricFamily(
        "trace_serve_mixed_weight_requests",
        "Requests that weights of several versions computed; starts anew with the engine",
        labels=LABELS,
    )
    families: tuple[Metric, ...] = (hints, written, pending, incidents, version, open_session, quarantined, mixed)
    for each in samples:
        report = each.report or {}
        files = _object(report, "hint_files")
        for name in _HINTS:
            _add(hints, [*each.name, name], files.get(name))
        _add(written, each.name, files.get("bytes"))
        _add(pending, each.name, files.get("pending"))
        counted = _object(report, "incidents")
        for name in _INCIDENTS:
            _add(incidents, [*each.name, name], counted.get(name))
        weights = _object(report, "weights")
        _add(version, each.name, weights.get("version"))
        _add(mixed, each.name, weights.get("mixed_requests"))
        if weights:
            _add(open_session, each.name, weights.get("session_open") is True)
            _add(quarantined, each.name, weights.get("quarantined") is not None)
    yield from families


def _object(report: dict[str, Any], name: str) -> dict[str, Any]:
    value = report.get(name)
    return value if isinstance(value, dict) else {}


def _add(family: CounterMetricFamily | GaugeMetricFamily, labels: Sequence[str], value: object) -> None:
    if isinstance(value, int | float):
        family.add_metric(labels, float(value))
