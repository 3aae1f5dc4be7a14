"""A program can start a front-end, wait for it, and never leaves one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from harness import Running

from trace_serve.errors import ConfigError, EngineError


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(*pids: int, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.05)


def test_stop_ends_server_and_engine_and_returns_the_exit_code(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        engine = running.engine()["pid"]
        assert running.process.stop() == 0
        assert running.process.stop() == 0
        wait_until_gone(engine)


def test_an_address_in_use_is_a_configuration_error_and_no_engine_is_started(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with Running(first) as running:
        other = Running(second)
        command = other.process._command
        command[command.index("--port") + 1] = str(running.process.port)
        other.process.start()
        deadline = time.monotonic() + 15
        while other.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert other.process.poll() == 3
        assert not (second / "engine.json").exists()
        assert httpx.get(running.url + "/health/ready").status_code == 200


def test_a_server_that_ends_early_is_reported_with_its_reason(tmp_path: Path) -> None:
    running = Running(tmp_path, max_restarts=0)
    (tmp_path / "fail-start").touch()
    running.process.start()
    with pytest.raises(EngineError, match=r"code 4: .*cannot start"):
        running.process.wait_ready(20)


def test_a_refusal_keeps_its_kind(tmp_path: Path) -> None:
    running = Running(tmp_path, max_in_flight=0)
    running.process.start()
    with pytest.raises(ConfigError, match="TRACE_SERVE_MAX_IN_FLIGHT"):
        running.process.wait_ready(20)


def test_a_server_whose_parent_is_killed_ends_with_its_engine(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from harness import Running\n"
        "running = Running(Path(sys.argv[1])); running.process.start(); running.process.wait_ready(20)\n"
        "print(running.process.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        engine = Running(tmp_path).engine()["pid"]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until_gone(server, engine)
