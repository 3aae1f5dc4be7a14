"""A verdict as a Markdown step summary for a pipeline."""

from __future__ import annotations

from eval_gate.report import format as fmt
from eval_gate.verdict import Verdict


def render_markdown(verdict: Verdict) -> str:
    """Outcome, reasons, numbers per kind, suite and look, and the digests that were judged."""
    name = verdict.policy_name or verdict.serving_evidence.source
    lines = [f"## {verdict.outcome}: {_cell(name)}", ""]
    lines += [f"- {_cell(text)}" for text in (*verdict.reasons, *verdict.labels)]
    lines += [
        "",
        f"{_cell(verdict.method)}; margin {_cell(fmt.margin(verdict))} points; positive = lost.",
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
    if len(verdict.suites) > 1:
        lines += ["", "| suite | queries | gap | interval | outcome |", "|---|---:|---:|---:|---|"]
        for suite in verdict.suites:
            found = suite.comparison
            lines.append(
                f"| {_cell(suite.suite)} | {found.n} | {fmt.points(found.gap)} "
                f"| {fmt.interval(found.lower, found.upper)} | {suite.outcome} |"
            )
    if verdict.looks:
        lines += [
            "",
            "| look | queries | suite | gap | interval | level | outcome |",
            "|---:|---:|---|---:|---:|---:|---|",
        ]
        for look in verdict.looks:
            for suite in look.suites:
                found = suite.comparison
                lines.append(
                    f"| {look.look} of {verdict.policy.looks} | {found.n} | {_cell(suite.suite)} "
                    f"| {fmt.points(found.gap)} | {fmt.interval(found.lower, found.upper)} | {suite.level:.4f} "
                    f"| {suite.outcome} |"
                )
    lines += ["", "| subject | digest |", "|---|---|"]
    lines += [f"| {key} | `{value or 'unknown'}` |" for key, value in verdict.subjects.model_dump().items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that stays inside its cell and starts no markup."""
    flat = " ".join(text.split())
    return "".join("\\" + char if char in "\\`*_[]<>|#~" else char for char in flat)
