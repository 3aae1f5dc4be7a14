"""The load test, headless, against an upstream of known delays in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_gate import suites

# Looked up and not imported: importing locust patches the sockets and threads of this whole process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the load extra is not installed")

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "deploy/locust/locustfile.py"
UPSTREAM = ROOT / "tests/trace_serve/server/scripted_engine.py"
KEY = "load-test-key"
STEP_S = 0.05


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(UPSTREAM), "--port", str(port), "--key", KEY, "--report", "{}"]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 15
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


class Result:
    """What one run of locust printed: its figures as JSON on standard output, the rest on standard error."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.output = done.stderr
        assert done.stdout.startswith("["), self.output
        self.rows = {row["method"]: row for row in json.loads(done.stdout)}

    def mean(self, kind: str) -> float:
        return float(self.rows[kind]["total_response_time"]) / self.count(kind)

    def count(self, kind: str, column: str = "num_requests") -> int:
        return int(self.rows[kind][column])


def write_queries(tmp_path: Path, script: str) -> str:
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": script}], "max_tokens": 64}) + "\n")
    return str(path)


def run(host: str, queries: str, *, key: str = KEY, users: int = 2, seconds: int = 3) -> Result:
    command = [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", host, "--headless", "-u", str(users),
        "-r", "100", "-t", f"{seconds}s", "--queries", queries, "--json", "--stop-timeout", "5",
    ]  # fmt: skip
    environment = {**os.environ, "TRACE_SERVE_API_KEY": key, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    return Result(done)


def test_the_figures_are_those_of_the_upstream(upstream: str, tmp_path: Path) -> None:
    tokens = 11
    result = run(upstream, write_queries(tmp_path, f"tokens={tokens} delay={STEP_S}"), seconds=4)
    step_ms = STEP_S * 1000
    assert result.code == 0, result.output
    answered = result.count("E2E")
    assert answered >= 4
    assert [result.count(kind) for kind in ("TTFT", "TPOT", "tokens/s")] == [answered] * 3
    assert step_ms <= result.mean("TTFT") < 4 * step_ms
    assert step_ms <= result.mean("TPOT") < 2 * step_ms
    assert tokens * step_ms <= result.mean("E2E") < 2 * tokens * step_ms
    spread = result.mean("E2E") - result.mean("TTFT") - (tokens - 1) * result.mean("TPOT")
    assert abs(spread) < 5
    assert 0.5 < result.mean("tokens/s") * result.mean("E2E") / 1000 / tokens < 1.5
    summary = re.search(r"tokens/s +([\d.]+) completion, .*\((\d+) completion tokens in ([\d.]+) s\)", result.output)
    assert summary is not None, result.output
    rate, total, wall = (float(value) for value in summary.groups())
    assert total == answered * tokens
    assert rate == pytest.approx(total / wall, rel=0.05)
    assert rate <= 2 / STEP_S


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("tokens=3 error_after=1", "error event: scripted failure"),
        ("tokens=3 delay=0.01 cut_after=1", ""),
        ("status=400 message=unusable", "unusable"),
    ],
)
def test_a_failed_answer_counts_as_a_failure_and_in_no_other_figure(
    upstream: str, tmp_path: Path, script: str, reason: str
) -> None:
    result = run(upstream, write_queries(tmp_path, script), users=1)
    assert result.code == 1, result.output
    assert result.count("E2E", "num_failures") == result.count("E2E") > 0
    assert "TTFT" not in result.rows
    assert reason in result.output


def test_a_wrong_key_is_a_failure(upstream: str, tmp_path: Path) -> None:
    result = run(upstream, write_queries(tmp_path, "tokens=1"), key="wrong", users=1)
    assert result.code == 1
    assert "status 401" in result.output


def test_the_shipped_queries_are_asked_by_default(upstream: str) -> None:
    result = run(upstream, "support", users=1)
    assert result.code == 0, result.output
    request = urllib.request.Request(upstream + "/script/seen", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        sent = json.loads(answer.read())["seen"][-1]
    shipped = [json.loads(line) for line in suites.path("support").read_text("utf-8").splitlines()]
    assert [sent["messages"], sent["max_tokens"]] in [[query["messages"], query["max_tokens"]] for query in shipped]
    assert (sent["stream"], sent["stream_options"], "model" in sent) == (True, {"include_usage": True}, False)


def test_locust_stays_out_of_the_test_process() -> None:
    assert "gevent" not in sys.modules
