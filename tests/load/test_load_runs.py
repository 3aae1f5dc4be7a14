"""Load runs as processes, against an upstream that behaves as the prompt says. All of them are started at once."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from load_runs import KEY, LOCUSTFILE, ROOT, Run, get, scripted_engine, write_queries

from trace_serve.cli import main
from trace_serve.load.runner import processes_options
from trace_serve.load.schedules import schedule

# Looked up and not imported: importing locust patches the sockets and threads of this whole process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the load extra is not installed")

STEP_S = 0.05
TOKENS = 11


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with scripted_engine() as url:
        yield url


class Command:
    """`trace-serve load` as a process, started at once."""

    def __init__(self, url: str, out: Path, *options: str) -> None:
        self.out = out
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trace_serve.cli", "load", url, *options, "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TRACE_SERVE_API_KEY": KEY},
        )
        self.printed = ""

    def wait(self) -> int:
        if not self.printed:
            try:
                self.printed, _ = self._process.communicate(timeout=400)
            except BaseException:
                self._process.kill()
                raise
        return self._process.returncode


class Runs:
    """Runs by name, each started at once with its own directory."""

    def __init__(self, url: str, directory: Path) -> None:
        def start(name: str, scripts: tuple[str, ...], *options: str) -> None:
            queries = write_queries(directory / f"{name}.jsonl", *scripts)
            self._of[name] = Run(url, directory / name, "--queries", queries, *options)

        self._of: dict[str, Run] = {}
        plain = (f"tokens={TOKENS} delay={STEP_S}",)
        start("closed", plain, "--users", "2", "--run-time", "4s", *processes_options(2))
        arrivals = ["--arrivals", "poisson", "--rate", "8", "--duration", "3s", "--warmup", "1s", "--seed", "5"]
        start("workers", plain, *arrivals, *processes_options(2), "--max-lag", "60")
        capped = [
            "--arrivals",
            "constant",
            "--rate",
            "10",
            "--duration",
            "2",
            "--max-in-flight",
            "3",
            "--drain",
            "0.2s",
        ]
        start("capped", ("hang=1 capped=1",), *capped, "--max-lag", "60")
        failing = ("tokens=3 error_after=1", "tokens=3 delay=0.01 cut_after=1", "status=503 message=full")
        start("failing", failing, "--arrivals", "constant", "--rate", "3", "--duration", "2s", "--max-lag", "60")
        start("bad-option", plain, "--arrivals", "poisson")
        mixed = ["--disconnect-share", "0.5", "--disconnect-after", "0.1s", "--slow-share", "0.2", "--max-lag", "60"]
        start("mixed", ("tokens=40 delay=0.05",), "--arrivals", "constant", "--rate", "10", "--duration", "3s", *mixed)

        slo = directory / "slo.toml"
        slo.write_text("[request]\nttft_ms = 1\n[run]\nmin_goodput = 0.5\n")
        short = ["--arrivals", "constant", "--rate", "4", "--duration", "1s", "--max-lag", "60", "--queries"]
        short.append(write_queries(directory / "short.jsonl", "tokens=3 delay=0.2"))
        self.command = Command(url, directory / "command", *short, "--slo", str(slo))
        self.comparison = Command(url, directory / "comparison", *short, "--against", url + "/", "--rounds", "2")

    def __getitem__(self, name: str) -> Run:
        return self._of[name]

    def wait(self) -> None:
        for run in (*self._of.values(), self.command, self.comparison):
            run.wait()


@pytest.fixture(scope="module")
def runs(upstream: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(upstream, tmp_path_factory.mktemp("runs"))
    yield started
    started.wait()


def rows(run: Run) -> list[dict[str, str]]:
    run.wait()
    with (run.out / "requests.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_closed_loop_reports_the_delays_of_the_upstream(runs: Runs) -> None:
    run = runs["closed"]
    report = run.report()
    assert report.exit_code == run.wait() == 0, run.stderr
    assert (report.processes, report.plan.users, report.plan.duration) == (2, 2, 4)
    answered = report.outcomes["ok"]
    assert answered >= 2
    assert report.completion_tokens == answered * TOKENS
    assert report.tokens_per_s == pytest.approx(report.completion_tokens / report.wall_s)
    for metric, least_s in (("ttft_sent", STEP_S), ("tpot", STEP_S), ("itl", STEP_S), ("e2e_sent", TOKENS * STEP_S)):
        latency = report.latency(metric)
        assert latency is not None
        assert latency.count == answered * (10 if metric == "itl" else 1)
        assert least_s * 990 <= latency.mean < 20 * least_s * 1000, metric


def test_locusts_own_statistics_have_a_row_for_each_figure(runs: Runs) -> None:
    run = runs["mixed"]
    report = run.report()
    stats = {row["method"]: row for row in json.loads(run.stdout)}
    assert {"E2E", "LEFT", "TTFT", "TPOT", "ITL", "tokens/s"} == set(stats)
    assert stats["LEFT"]["num_requests"] == report.outcomes["left"]
    assert stats["E2E"]["num_requests"] == report.outcomes["ok"]


def test_two_processes_send_the_schedule_of_one(runs: Runs) -> None:
    """Their histograms and rows are merged, and every arrival is sent exactly once."""
    run = runs["workers"]
    report = run.report()
    assert run.wait() == 0, run.stderr
    assert report.processes == 2
    sent = rows(run)
    indices = [int(row["index"]) for row in sent]
    assert indices == list(range(report.warmup_requests, report.warmup_requests + report.offered))
    times = schedule(report.plan, None)
    assert [float(row["scheduled_s"]) for row in sent] == pytest.approx(times[times >= 1.0].tolist(), abs=1e-5)
    e2e = report.latency("e2e_scheduled")
    assert e2e is not None
    assert e2e.count == report.offered
    assert {index % 2 for index in indices} == {0, 1}


def test_arrivals_above_the_cap_are_dropped_and_never_sent_later(runs: Runs) -> None:
    run = runs["capped"]
    report = run.report()
    assert report.outcomes == {"unfinished": 3, "dropped": 17}
    assert run.wait() == report.exit_code == 2
    assert [row["outcome"] for row in rows(run)] == ["unfinished"] * 3 + ["dropped"] * 17
    assert {row["sent_s"] for row in rows(run)[3:]} == {""}


def test_what_was_not_answered_is_counted_by_reason_and_has_no_latency(runs: Runs) -> None:
    run = runs["failing"]
    report = run.report()
    assert report.outcomes == {"failed": 4, "refused": 2}, run.stderr
    assert report.reasons["error event: scripted failure"] == 2
    assert report.reasons["status 503: full"] == 2
    assert sum(report.reasons.values()) == 6
    assert [each.metric for each in report.latencies] == ["lag"]
    assert run.wait() == 2  # nothing was answered, so that nothing is known


def test_clients_that_leave_or_read_slowly_are_counted_apart(runs: Runs, upstream: str) -> None:
    run = runs["mixed"]
    report = run.report()
    assert run.wait() == 0, run.stderr
    kinds = report.clients
    assert sum(kinds.values()) == report.offered == 30
    assert min(kinds[name] for name in ("plain", "slow", "leaves")) > 0
    assert report.outcomes["left"] > 0
    e2e = report.latency("e2e_sent")
    assert e2e is not None
    assert e2e.count <= kinds["plain"]
    runs.wait()
    assert get(upstream + "/script/seen")["running"] == 0


def test_a_bad_option_of_locust_ends_it_before_anything_is_sent(runs: Runs) -> None:
    run = runs["bad-option"]
    assert run.wait() == 3
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --rate: got none")
    assert not (run.out / "report.json").exists()


def test_the_command_writes_every_file_and_exits_by_the_slo(runs: Runs) -> None:
    command = runs.command
    assert command.wait() == 1, command.printed
    assert "goodput" in command.printed
    assert "SLO missed" in command.printed
    written = {path.name for path in command.out.iterdir()}
    assert written == {"report.json", "report.html", "summary.csv", "requests.csv", "plan.json", "locust.log"}
    assert KEY not in "".join(path.read_text() for path in command.out.iterdir())


def test_a_comparison_of_a_server_with_itself_has_its_ratios_and_intervals(runs: Runs) -> None:
    comparison = runs.comparison
    assert comparison.wait() == 0, comparison.printed
    result: dict[str, Any] = json.loads((comparison.out / "comparison.json").read_text())
    ratios = {each["name"]: each for each in result["ratios"]}
    assert result["pairs"] == 8
    assert 0.2 < ratios["E2E mean ms"]["ratio"] < 5
    assert ratios["tokens an answer"]["ratio"] == 1
    assert (comparison.out / "comparison.html").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["ftp://x"], "URL"),
        (["http://x", "--arrivals", "poisson"], "--rate"),
        (["http://x", "--search", "1:2", "--compare-hints"], "--search"),
        (["http://x", "--search", "1:2", "--rate", "4"], "--rate"),
        (["http://x", "--against", "y"], "--against"),
    ],
)
def test_a_bad_command_line_is_one_line_and_nothing_is_written(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", *arguments, "--out", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error
    assert not (tmp_path / "out").exists()


def test_locust_stays_out_of_the_test_process() -> None:
    assert LOCUSTFILE.exists()
    assert "gevent" not in sys.modules
