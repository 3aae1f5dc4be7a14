"""Writes what a run leaves behind: whole files or none."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trace_serve.errors import ConfigError
from trace_serve.load.html import render_html
from trace_serve.load.plan import LoadPlan, make_plan
from trace_serve.load.render import requests_csv, summary_csv
from trace_serve.load.report import LoadReport

REPORT = "report.json"


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is either as it was or complete."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_directory(path: Path) -> None:
    """Raises: ConfigError: it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out: {path} cannot be made: {exc.strerror or exc}", field="out") from exc
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--out: {path} cannot be written to", field="out")


def write_report(directory: Path, report: LoadReport, rows: Iterable[dict[str, Any]]) -> None:
    """`report.json`, `report.html`, `summary.csv` and `requests.csv`."""
    write_whole(directory / "requests.csv", requests_csv(rows))
    write_whole(directory / "summary.csv", summary_csv(report))
    write_whole(directory / "report.html", render_html(report))
    write_whole(directory / REPORT, report.model_dump_json(indent=1) + "\n")


def read_report(directory: Path) -> LoadReport:
    """Raises: ConfigError: there is none, or it is of another version."""
    path = directory / REPORT
    try:
        return LoadReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as exc:
        raise ConfigError(f"{path}: not the report of a load test: {str(exc).splitlines()[0]}", field="out") from exc


def read_plan(path: Path) -> LoadPlan:
    """A plan that `write_whole` wrote as JSON.

    Raises:
        ConfigError: it cannot be read or used.
    """
    try:
        given = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--plan: {path} cannot be read: {exc}", field="plan") from exc
    if not isinstance(given, dict):
        raise ConfigError(f"--plan: {path}: got {type(given).__name__}, expected an object", field="plan")
    return make_plan(given)
