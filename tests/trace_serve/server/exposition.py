"""What a page of Prometheus text holds, and the naming rules of `promtool check metrics` that can be told from it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

UNITS_OF_OLD = ("milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes", "percent")
ABBREVIATED = ("s", "ms", "us", "sec", "b", "kb", "mb", "gb", "pct")
TYPES = ("counter", "gauge", "histogram", "summary")


def page(url: str) -> str:
    answer = httpx.get(url + "/metrics", timeout=50)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return answer.text


def families(text: str) -> dict[str, Metric]:
    parsed = list(text_string_to_metric_families(text))
    names = [family.name for family in parsed]
    assert len(names) == len(set(names)), "a family that is written twice"
    return {family.name: family for family in parsed}


def value(text: str, name: str, **labels: str) -> float | None:
    """The sample of that name and at least these labels; None where there is none."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


def sample_names(text: str) -> set[str]:
    """Names that a query can use: of the samples, and of families that have none yet."""
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        names |= {sample.name for sample in family.samples}
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def faults(found: Iterable[Metric]) -> list[str]:
    """What promtool would complain about, a line each."""
    said = []
    for family in found:
        name, parts = family.name, family.name.split("_")
        if not family.documentation.strip():
            said.append(f"{name}: no help text")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            said.append(f"{name}: other characters than a-z, 0-9 and _")
        if family.type != "counter" and name.endswith("_total"):
            said.append(f"{name}: _total is for counters")
        if family.type not in ("histogram", "summary") and name.endswith(("_count", "_sum", "_bucket")):
            said.append(f"{name}: a suffix that histograms have")
        said += [f"{name}: {part!r} is a type" for part in parts if part in TYPES]
        said += [f"{name}: {part!r} is no base unit" for part in parts if part in UNITS_OF_OLD]
        said += [f"{name}: {part!r} is an abbreviated unit" for part in parts[1:] if part in ABBREVIATED]
        reserved = {"le"} if family.type != "histogram" else set()
        said += [
            f"{name}: label {label!r}"
            for sample in family.samples
            for label in sample.labels
            if label in reserved or not re.fullmatch(r"[a-z][a-z0-9_]*", label)
        ]
    return said
