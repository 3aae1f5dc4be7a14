"""The figures of a benchmark that stand in the table of all of them."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", type=Path, help="file that receives what stands in the table of all benchmarks")


def write(path: Path | None, figures: dict[str, str]) -> None:
    """Args:
    path: JSON file; None writes nothing.
    figures: what was measured, to its value with its spread.
    """
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median [smallest, largest] of the rounds."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"
