"""Load on the real engine with hints: every answer's hint file is fetched and timed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from load_runs import Run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the load extra is not installed"),
]


def test_hints_of_every_answer_come_under_load(front_end: Any, tmp_path: Path) -> None:
    options = ["--arrivals", "poisson", "--rate", "1.5", "--duration", "4s", "--seed", "4", "--max-lag", "10"]
    options += ["--hints", "fetch", "--max-tokens", "6", "--workload", "shared-prefix", "--prefix-words", "20"]
    run = Run(front_end.url, tmp_path / "out", *options, key="test-key-0123456789")
    report = run.report()
    assert run.wait() == 0, run.stderr
    answered = report.outcomes["ok"]
    assert answered == report.offered > 0
    hints = report.latency("hints")
    assert hints is not None
    assert hints.count == answered
    assert report.hint_bytes > 1000 * answered
    assert {each.policy for each in report.versions} == {"tiny@1"}
    assert report.completion_tokens <= 6 * answered
