"""A measurement as JSON values and as a table."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.table import Table

from trace_serve.mismatch.metrics import CLIP, QUANTILES, Distance
from trace_serve.mismatch.run import REFERENCE, Measurement, Row

HEADINGS = ("training side", "|dlogp|", "k1", "k3", "KL", "top-1", "ratio 1-99 %", f"clip {CLIP:g}", "router", "bits")


def to_dict(measured: Measurement) -> dict[str, Any]:
    """Plain JSON values: everything that the table and the page show, and every layer."""

    def row(each: Row) -> dict[str, Any]:
        return {
            "key": each.variant.key,
            "label": each.variant.label,
            **asdict(each.distance),
            "router_agreement": fmean(each.router) if each.router else None,
            "router_agreement_layers": list(each.router),
            "sites": {site: asdict(found) for site, found in each.sites.items()},
            "gradient_cosine": fmean(each.gradient) if each.gradient else None,
            "gradient_cosine_layers": list(each.gradient),
        }

    return {
        "schema_version": 2,
        "model": measured.subject.name,
        "recipe_id": measured.subject.recipe.recipe_id,
        "options": asdict(measured.options),
        "sites": list(measured.sites),
        "hint_bytes_per_token": measured.hint_bytes,
        "clip": CLIP,
        "ratio_quantiles_at": list(QUANTILES),
        "gradient_reference": REFERENCE,
        "rows": [row(each) for each in measured.rows],
        "probes": [row(each) for each in measured.probes],
        "advice": measured.advice,
    }


def render(measured: Measurement) -> tuple[Table, Table]:
    """What every variant is apart from the rollouts, and what differs at each site before it is guided."""
    gradients = measured.options.gradients > 0
    table = Table(*headings(gradients), title=f"{measured.subject.name}: distance to its rollouts")
    table.caption = caption(measured)
    details = Table(*SITE_HEADINGS, title="What the trainer alone would round otherwise than its rollouts")
    for group in (measured.rows, measured.probes):
        for each in group:
            table.add_row(*cells(each, gradients))
            for row in site_cells(each) if each in measured.rows else ():
                details.add_row(*row)
        table.add_section()
    for one in (table, details):
        for column in one.columns[1:]:
            column.justify = "right"
    return table, details


def headings(gradients: bool) -> list[str]:
    return [*HEADINGS, *(["gradient"] if gradients else [])]


def caption(measured: Measurement) -> str:
    options = measured.options
    return (
        f"{options.prompts} rollouts, {measured.rows[0].distance.tokens} sampled tokens at temperature "
        f"{options.temperature:g}; hints of {', '.join(measured.sites)}, {measured.hint_bytes:,} B a token; "
        f"KL of the {options.top} most probable tokens, estimated for the others; in brackets 95 % intervals"
    )


def cells(row: Row, gradients: bool) -> list[str]:
    """A line of the first table."""
    found = row.distance
    low, _, high = found.ratio_quantiles
    shares = [each.total.bits for each in row.sites.values()]
    filled = [
        row.variant.label,
        _spread(found, "abs_delta"),
        _figure(found.k1),
        _spread(found, "k3"),
        _spread(found, "kl"),
        _spread(found, "top1"),
        f"{low:.2f}-{high:.2f}",
        f"{found.clipped:.1%}",
        f"{fmean(row.router):.3f}" if row.router else "-",
        f"{min(shares):.1%}-{max(shares):.1%}" if shares else "-",
    ]
    return [*filled, *([f"{fmean(row.gradient):.3f}" if row.gradient else "-"] if gradients else [])]


SITE_HEADINGS = ("training side", "site", "lowest bit", "code", "one step apart", "scale", "one scale step apart")


def site_cells(row: Row) -> list[list[str]]:
    """Lines of the second table, one a site."""
    return [
        [row.variant.label, site, *(_percent(value) for value in asdict(found.total).values())]
        for site, found in row.sites.items()
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _figure(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _spread(found: Distance, name: str) -> str:
    interval = found.intervals.get(name)
    shown = _figure(getattr(found, name))
    return shown if interval is None else f"{shown} [{_figure(interval.low)}, {_figure(interval.high)}]"
