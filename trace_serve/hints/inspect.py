"""What `trace-serve hints inspect` shows of a hint file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from trace_serve.hints import wire
from trace_serve.hints.syndrome.packed import PackedHints

PAPER_BYTES_PER_TOKEN = 51_840
"""Full codes and scales of Qwen3.5-35B-A3B, 92,160 values at 4.5 bits (arXiv 2610.07767: "about 50 KB")."""


@dataclass(frozen=True)
class SiteSummary:
    """Sizes of one site.

    Attributes:
        name: the site.
        layers: number of layers.
        values: values a row and layer.
        codes: `lsb` or `full`.
        scale: `lsb`, `byte` or `none`.
        bytes_per_token: stored bytes a row, masks excluded.
        full_bytes_per_token: what full codes and scale bytes of the same values would take.
        present: share of rows that are present, 0 to 1; None without rows.
        ones: share of hint bits that are 1 among present rows; None without any.
    """

    name: str
    layers: int
    values: int
    codes: str
    scale: str
    bytes_per_token: int
    full_bytes_per_token: int
    present: float | None
    ones: float | None


def summarize_site(site: wire.Site) -> SiteSummary:
    rows = site.bits[site.present]
    ones = int.bit_count(int.from_bytes(rows.tobytes(), "little")) / (rows.size * 16) if rows.size else None
    layers = len(site.layers)
    return SiteSummary(
        name=site.name,
        layers=layers,
        values=site.values,
        codes=site.code_kind,
        scale=site.scale_kind,
        bytes_per_token=site.bytes_per_token,
        full_bytes_per_token=layers * site.values * 9 // 16,
        present=float(site.present.mean()) if site.present.size else None,
        ones=ones,
    )


def _coded(summary: SiteSummary, hints: PackedHints) -> SiteSummary:
    coded = hints.coded[summary.name]
    present = float(coded.present.mean()) if coded.present.size else None
    size = round(coded.bytes_per_token(hints.site(summary.name)))
    return replace(summary, codes="syndrome", present=present, ones=None, bytes_per_token=size)


def summarize(hints: wire.HintFile) -> dict[str, Any]:
    """Everything about a file but its payload, as plain JSON values."""
    sites = [summarize_site(site) for site in hints.sites]
    if isinstance(hints, PackedHints):
        sites = [_coded(each, hints) if each.name in hints.coded else each for each in sites]
    versions = Counter[str]()
    for start, end, version in hints.weight_versions:
        versions[version] += end - start
    return {
        "schema_version": wire.SCHEMA_VERSION,
        "rows": hints.rows,
        "first_token": hints.first_token,
        "recipe_id": hints.recipe_id,
        "model_digest": hints.model_digest,
        "weight_versions": dict(versions),
        "sites": {site.name: {k: v for k, v in vars(site).items() if k != "name"} for site in sites},
        "bytes_per_token": sum(site.bytes_per_token for site in sites),
        "full_bytes_per_token": sum(site.full_bytes_per_token for site in sites),
        "paper_bytes_per_token": PAPER_BYTES_PER_TOKEN,
        "logprobs": hints.logprobs is not None,
        "routed_experts": None if hints.routed_experts is None else list(hints.routed_experts.shape[1:]),
    }
