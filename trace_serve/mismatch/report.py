"""A measurement as a table, as JSON and as a page."""

from __future__ import annotations

import html
from dataclasses import asdict
from typing import Any

from rich.table import Table

from trace_serve.mismatch.metrics import CLIP, QUANTILES
from trace_serve.mismatch.run import Measurement, Row


def to_dict(measured: Measurement) -> dict[str, Any]:
    """Plain JSON values."""

    def row(each: Row) -> dict[str, Any]:
        return {"key": each.variant.key, "label": each.variant.label, **asdict(each.distance)}

    return {
        "schema_version": 1,
        "policy": measured.policy,
        "recipe_id": measured.recipe_id,
        "options": asdict(measured.options),
        "hint_bytes_per_token": measured.hint_bytes_per_token,
        "clip": CLIP,
        "ratio_quantiles_at": list(QUANTILES),
        "rows": [row(each) for each in measured.rows],
        "probes": [row(each) for each in measured.probes],
        "advice": measured.advice,
    }


def render(measured: Measurement) -> Table:
    """The table."""
    gradients = measured.options.gradients > 0
    headings = ["training side", "|dlogp|", "k1", "k3", "ratio 1-99 %", f"clip {CLIP:g}", "router", "bits differ"]
    table = Table(*headings, *(["grad cos"] if gradients else []), title=f"{measured.policy}: mismatch to its rollouts")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in (measured.rows, measured.probes):
        for each in group:
            table.add_row(*_cells(each, gradients))
        table.add_section()
    tokens = measured.rows[0].distance.tokens
    table.caption = (
        f"{measured.options.prompts} rollouts on the FP4 engine, {tokens} sampled tokens at temperature "
        f"{measured.options.temperature:g}; hints of {', '.join(measured.options.sites)}"
    )
    return table


def _cells(row: Row, gradients: bool) -> list[str]:
    found = row.distance
    low, _, high = found.ratio_quantiles
    cells = [
        row.variant.label,
        f"{found.abs_delta:.3f}",
        f"{found.k1:.4f}",
        f"{found.k3:.4f}",
        f"{low:.2f}-{high:.2f}",
        f"{found.clipped:.1%}",
        "-" if found.router_agreement is None else f"{found.router_agreement:.3f}",
        _bits(found.bits_differ),
    ]
    if gradients:
        cells.append("-" if found.gradient_cosine is None else f"{found.gradient_cosine:.3f}")
    return cells


def _bits(shares: dict[str, float]) -> str:
    return "-" if not shares else f"{min(shares.values()):.1%}-{max(shares.values()):.1%}"


def page(measured: Measurement) -> str:
    """A self-contained page: the table, and k3 of every variant as bars on a logarithmic axis."""
    rows = [*measured.rows, *measured.probes]
    headings = [
        "training side",
        "mean |Δ log p|",
        "k1",
        "k3",
        "ratio, 1 % to 99 %",
        f"clipped at {CLIP:g}",
        "router agreement",
        "lowest bits that differ",
        "gradient cosine",
    ]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(each, True)) + "</tr>" for each in rows
    )
    advice = "" if measured.advice is None else f"<p><b>Probe:</b> {html.escape(measured.advice)}</p>"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Mismatch</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1f24}"
        "table{border-collapse:collapse;width:100%}th,td{padding:.3rem .5rem;border-bottom:1px solid #d8dee4;"
        "text-align:right}th:first-child,td:first-child{text-align:left}.bar{fill:#0b6e99}"
        "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td{border-color:#30363d}"
        "text{fill:#e6edf3}}</style>"
        f"<h1>{html.escape(measured.policy)}: distance to its FP4 rollouts</h1>"
        f"<p>{html.escape(str(render(measured).caption))}. Hints take {measured.hint_bytes_per_token:,} bytes a token "
        "with whole scale bytes.</p>"
        f"{_bars(rows)}{advice}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n"
    )


def _bars(rows: list[Row]) -> str:
    import math

    floor = 1e-5
    values = [max(each.distance.k3, floor) for each in rows]
    low, high = math.log10(floor), max(math.log10(max(values)), math.log10(floor) + 1)
    parts = []
    for index, (each, value) in enumerate(zip(rows, values, strict=True)):
        width = 480 * (math.log10(value) - low) / (high - low)
        y = 8 + 24 * index
        parts.append(
            f'<text x="330" y="{y + 13}" text-anchor="end" font-size="13">{html.escape(each.variant.label)}</text>'
            f'<rect class="bar" x="340" y="{y}" width="{max(width, 1):.1f}" height="17"/>'
            f'<text x="{345 + width:.1f}" y="{y + 13}" font-size="12">{each.distance.k3:.4g}</text>'
        )
    height = 16 + 24 * len(rows)
    return (
        f'<h2>k3 (logarithmic)</h2><svg viewBox="0 0 900 {height}" width="100%" role="img" '
        f'aria-label="k3 of each variant">{"".join(parts)}</svg>'
    )
