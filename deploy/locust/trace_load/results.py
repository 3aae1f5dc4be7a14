"""The end of a run: report, files, table, exit code."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.console import Console

from trace_load.session import Session
from trace_serve.load.files import make_directory, write_report
from trace_serve.load.render import render
from trace_serve.load.report import conclude


def check_directory(options: Namespace) -> None:
    """Raises: ConfigError: `--out` cannot be written to."""
    if options.out:
        make_directory(Path(options.out))


def conclude_run(session: Session) -> int:
    """Prints the report on standard error, writes it if asked, and returns the exit code."""
    options = session.environment.parsed_options
    report = conclude(
        session.plan,
        session.slo,
        session.merged,
        host=session.environment.host or "",
        began=session.began_at,
        processes=session.workers,
        silent_workers=session.workers - len(session.ended),
        swaps=session.swaps,
        notes=session.workload.notes,
        faults=session.faults,
    )
    if options.out:
        write_report(Path(options.out), report, session.merged.rows)
    Console(stderr=True, width=None if Console(stderr=True).is_terminal else 140).print(render(report))
    return report.exit_code
