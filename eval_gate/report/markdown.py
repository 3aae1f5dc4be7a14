"""A verdict as a Markdown step summary for a pipeline."""

from __future__ import annotations

from eval_gate.report import format as fmt
from eval_gate.verdict import Verdict


def render_markdown(verdict: Verdict) -> str:
    """Outcome, reasons, numbers per kind and the digests that were judged."""
    name = verdict.policy_name or verdict.serving_evidence.source
    lines = [f"## {verdict.outcome}: {_cell(name)}", ""]
    lines += [f"- {_cell(text)}" for text in (*verdict.reasons, *verdict.labels)]
    lines += [
        "",
        f"{_cell(verdict.method)}; margin {100 * verdict.policy.margin:g} points; positive = lost.",
        "",
        "| kind | queries | training | serving | gap | interval | lost | gained |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, found in [*verdict.kinds.items(), ("**all**", verdict.overall)]:
        lines.append(
            f"| {_cell(kind) if kind != '**all**' else kind} | {found.n} | {fmt.percent(found.training_pass_rate)} "
            f"| {fmt.percent(found.serving_pass_rate)} | {fmt.points(found.gap)} "
            f"| {fmt.interval(found.lower, found.upper)} | {found.only_training} | {found.only_serving} |"
        )
    lines += ["", "| subject | digest |", "|---|---|"]
    lines += [f"| {key} | `{value or 'unknown'}` |" for key, value in verdict.subjects.model_dump().items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that stays inside its cell and starts no markup."""
    flat = " ".join(text.split())
    return "".join("\\" + char if char in "\\`*_[]<>|#~" else char for char in flat)
