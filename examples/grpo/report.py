"""The arms beside each other as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from learner import ARMS

from trace_serve.mismatch.charts import line_chart

Rows = Sequence[Mapping[str, Any]]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}"
    "table{border-collapse:collapse}th,td{padding:.3rem .6rem;border-bottom:1px solid #8886;text-align:right}"
    "th:first-child,td:first-child{text-align:left}figure{margin:1.5rem 0}figcaption{font-weight:600}"
    "text{font-size:12px;fill:currentColor}:root{color-scheme:light dark}"
)
CURVES = {
    "reward": ("reward, mean over the answers", False),
    "abs_delta": ("mean |log p trainer - log p rollout|", False),
    "k3": ("k3", True),
    "ratio_max": ("largest importance ratio", True),
    "clipped": ("share of tokens with a ratio outside 1/5 to 5", False),
    "loss": ("loss", False),
    "grad_norm": ("norm of the gradient", False),
}
"""Title, and whether the axis is logarithmic, of each key of the lines that is drawn."""


def page(arms: Mapping[str, Rows], options: Mapping[str, Any], policy: str) -> str:
    """The whole page.

    Args:
        arms: the lines of each arm, by its key.
        options: of the loop.
        policy: name and version.
    """
    steps = [step + 1 for step in range(max((len(rows) for rows in arms.values()), default=0))]
    charts = []
    for key, (title, logarithmic) in CURVES.items():
        series = {ARMS[arm]: _column(rows, key, len(steps)) for arm, rows in arms.items()}
        if any(value is not None for values in series.values() for value in values):
            charts.append(line_chart(title, "step", steps, series, logarithmic=logarithmic))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>GRPO with FP4 rollouts</title><style>{_STYLE}'
        f"</style><h1>GRPO with FP4 rollouts: {escape(policy)}</h1><p>Every arm starts from the same weights, is shown "
        f"the same prompts and replays the rollouts' routes (R3).</p>{_table(arms)}{''.join(charts)}"
        f"<details><summary>Options</summary><pre>{escape(json.dumps(options, indent=1))}</pre></details></html>\n"
    )


def summary(rows: Rows) -> dict[str, float | None]:
    """Reward of the first and last quarter of the steps, held-out reward, and the mismatch over all trained tokens."""
    quarter = max(1, len(rows) // 4)
    rewards = [row["reward"] for row in rows]
    trained = [row for row in rows if "k3" in row]
    tokens = sum(row["trained_tokens"] for row in trained)

    def mean(key: str) -> float | None:
        return sum(row[key] * row["trained_tokens"] for row in trained) / tokens if tokens else None

    return {
        "reward, first quarter": sum(rewards[:quarter]) / quarter if rewards else None,
        "last quarter": sum(rewards[-quarter:]) / quarter if rewards else None,
        "held out, before": next((row["held_out_before"] for row in rows if "held_out_before" in row), None),
        "after": next((row["held_out_after"] for row in rows if "held_out_after" in row), None),
        "mean |Δ log p|": mean("abs_delta"),
        "k3": mean("k3"),
        "largest ratio": max((row["ratio_max"] for row in trained), default=None),
        "clipped": mean("clipped"),
    }


def _column(rows: Rows, key: str, length: int) -> list[float | None]:
    return [row.get(key) for row in rows] + [None] * (length - len(rows))


def _table(arms: Mapping[str, Rows]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in ("arm", *summary([])))
    lines = []
    for arm, rows in arms.items():
        values = summary(rows).values()
        cells = "".join(f"<td>{'-' if value is None else format(value, '.3g')}</td>" for value in values)
        lines.append(f"<tr><td>{escape(ARMS[arm])}</td>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
