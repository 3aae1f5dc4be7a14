"""A measurement as one HTML file that loads nothing from elsewhere: tables, and charts layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from trace_serve.mismatch.charts import line_chart
from trace_serve.mismatch.report import SITE_HEADINGS, caption, cells, headings, site_cells
from trace_serve.mismatch.run import Measurement, Row
from trace_serve.mismatch.sites import Shares

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;"
    "padding:0 1rem}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .5rem;border-bottom:1px solid #8886;text-align:right}"
    "th:first-child,td:first-child{text-align:left}td:not(:first-child){white-space:nowrap}"
    "figure{margin:1.5rem 0}svg{width:100%;height:auto}"
    "svg text{fill:currentColor;font-size:12px}figcaption{font-weight:600}"
)
_SHARES: tuple[tuple[str, Callable[[Shares], float | None]], ...] = (
    ("values with another lowest bit", lambda shares: shares.bits),
    ("values with another code", lambda shares: shares.codes),
    ("differing codes that are one step apart", lambda shares: shares.one_step),
    ("blocks with another scale", lambda shares: shares.scales),
)


def page(measured: Measurement) -> str:
    """The whole file."""
    rows = [*measured.rows, *measured.probes]
    gradients = measured.options.gradients > 0
    title = f"{measured.subject.name}: distance to its FP4 rollouts"
    advice = "" if measured.advice is None else f"<p><b>Probe:</b> {escape(measured.advice)}.</p>"
    details = [line for each in measured.rows for line in site_cells(each)]
    body = (
        f"<h1>{escape(title)}</h1><p>{escape(caption(measured))}.</p>{advice}"
        f"{_table(headings(gradients), (cells(each, gradients) for each in rows))}"
        "<h2>What the trainer alone would round otherwise than its rollouts</h2>"
        f"{_table(SITE_HEADINGS, details)}<h2>Layer by layer</h2>{''.join(_charts(measured.rows))}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + f"</tr>{body}</table>"


def _charts(rows: Sequence[Row]) -> Iterable[str]:
    """With routes replayed, so that lines differ by the rounding alone; the router's choices also without."""
    replayed = [row for row in rows if row.variant.routing]
    sites = next((row.sites for row in replayed if row.sites), {})
    for site, found in sites.items():
        layers = list(found.layers)
        for name, share in _SHARES:
            lines = {
                row.variant.label: [share(row.sites[site].layers[layer]) for layer in layers]
                for row in replayed
                if site in row.sites
            }
            if any(value is not None for values in lines.values() for value in values):
                yield line_chart(f"{site}: share of {name}", "layer", layers, lines)
    for routing, when in ((True, "routes replayed"), (False, "no R3")):
        shown = {row.variant.label: row.router for row in rows if row.router and row.variant.routing is routing}
        if shown:
            places = range(len(next(iter(shown.values()))))
            yield line_chart(
                f"share of the rollout's experts that the trainer's router chooses, {when}", "MoE layer", places, shown
            )
    with_gradient = {row.variant.label: list(row.gradient) for row in replayed if row.gradient}
    if with_gradient:
        places = range(len(next(iter(with_gradient.values()))))
        yield line_chart("cosine of the gradient to that of full replay", "layer", places, with_gradient)
