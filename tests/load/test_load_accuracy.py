"""Figures against a server of known delays; and what a closed loop hides when a server stalls."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from load_runs import Run, get, known_server, write_queries

pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the load extra is not installed")

FIRST_S = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]
GAP_S, TOKENS = 0.1, 6


def test_percentiles_are_those_of_the_server_to_two_percent(tmp_path: Path) -> None:
    """What the machine adds is noted: when the server really answered, and how late a request was really sent."""
    queries = write_queries(
        tmp_path / "queries.jsonl", *(f"first={first} gap={GAP_S} tokens={TOKENS}" for first in FIRST_S)
    )
    options = ["--arrivals", "constant", "--rate", "10", "--duration", "6s", "--max-lag", "60"]
    with known_server() as url:
        run = Run(url, tmp_path / "out", "--queries", queries, *options)
        report = run.report()
        served = get(url + "/log")
    assert run.wait() == 0, run.stderr
    assert report.outcomes == {"ok": 60}
    lag = report.latency("lag")
    assert lag is not None
    for metric, noted in (("ttft_sent", "first"), ("e2e_sent", "end")):
        latency = report.latency(metric)
        assert latency is not None
        real_s = sorted(each[noted] for each in served)
        for name, measured_ms in latency.quantiles.items():
            real_ms = 1000 * real_s[int(float(name) / 100 * len(real_s) + 0.5) - 1]  # as HdrHistogram counts
            noise_ms = 60 + 3 * lag.maximum
            assert real_ms * 0.98 <= measured_ms <= real_ms * 1.02 + noise_ms, (metric, name)
        nominal_ms = 1000 * (np.median(FIRST_S) + (GAP_S * (TOKENS - 1) if noted == "end" else 0))
        assert latency.quantiles["50"] >= 0.98 * (nominal_ms - 50)  # the lower of the two middle delays
    tpot = report.latency("tpot")
    assert tpot is not None
    # A late first token makes TPOT shorter, so that only the mean over all answers is bounded from below.
    assert 0.8 * GAP_S * 1000 <= tpot.mean <= 1.02 * GAP_S * 1000 + 20 + lag.maximum


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one(tmp_path: Path) -> None:
    """Coordinated omission: while the server stalls, a closed loop asks nothing, so that one answer is late."""
    queries = write_queries(tmp_path / "queries.jsonl", "first=0.02 tokens=1")
    stall = ("--stall-after", "2", "--stall-for", "4")
    with known_server(*stall) as one, known_server(*stall) as other:
        closed = Run(one, tmp_path / "closed", "--queries", queries, "--users", "1", "--run-time", "8s")
        options = ["--arrivals", "constant", "--rate", "10", "--duration", "8s", "--max-lag", "60"]
        opened = Run(other, tmp_path / "open", "--queries", queries, *options)
        hidden, shown = closed.report().latency("e2e_scheduled"), opened.report().latency("e2e_scheduled")
    assert hidden is not None
    assert shown is not None
    assert hidden.maximum > 2000
    assert hidden.quantiles["90"] < 1000
    assert shown.quantiles["90"] > 2500
    assert shown.quantiles["90"] > 4 * hidden.quantiles["90"]
    assert opened.report().offered == 80
