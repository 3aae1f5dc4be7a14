"""Benchmarks are run by hand, so that what they import from the packages has to be looked at here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_benchmark_imports() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert names
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
