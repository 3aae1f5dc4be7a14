"""Benchmarks are run by hand, so that what they import from the packages has to be looked at here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_benchmark_imports() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert names
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_figure_that_was_measured_and_says_how_loaded_the_machine_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_all

    record = {"date": "2026-01-02", "minutes": 1.25, "load": [0.5, 3.0], "quick": True, "machine": "2 cores"}
    for name, value in (("gate", "1.003 [1.001, 1.010]"), ("engine", "0.80 [0.70, 0.90]")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "figures": {f"{name} figure": value}}))
    lines = bench_all.page(tmp_path).splitlines()
    table = [line for line in lines if line.startswith(("| gate", "| engine"))]
    assert table[:2] == [
        "| engine | engine figure | 0.80 [0.70, 0.90] |",
        "| gate | gate figure | 1.003 [1.001, 1.010] |",
    ]
    assert table[2] == "| engine | 2026-01-02 | 1.2 | 0.5, 3.0 | quick |"
    assert [line for line in lines if line.startswith("Machine")] == ["Machine: 2 cores."]
