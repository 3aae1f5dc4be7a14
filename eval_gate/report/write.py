"""Every form of a verdict as files in one directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval_gate.arms.records import write_atomic
from eval_gate.report.html import render_html
from eval_gate.report.junit import render_junit
from eval_gate.report.markdown import render_markdown
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class ReportPaths:
    """Where the reports of a directory lie."""

    verdict: Path
    html: Path
    markdown: Path
    junit: Path

    @classmethod
    def below(cls, directory: Path) -> ReportPaths:
        return cls(
            directory / "verdict.json", directory / "report.html", directory / "summary.md", directory / "junit.xml"
        )


def write_reports(verdict: Verdict, directory: Path) -> ReportPaths:
    """Writes verdict and reports, each whole or not at all.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    paths = ReportPaths.below(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(paths.verdict, (verdict.model_dump_json(indent=2) + "\n").encode())
        write_atomic(paths.html, render_html(verdict).encode())
        write_atomic(paths.markdown, render_markdown(verdict).encode())
        write_atomic(paths.junit, render_junit(verdict).encode())
    except OSError as exc:
        raise ConfigError(f"--out {directory}: cannot be written: {exc.strerror}", field="out") from exc
    return paths
