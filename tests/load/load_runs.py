"""Starts servers and load runs as processes, and reads what the runs left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trace_serve.load.files import read_report
from trace_serve.load.report import LoadReport

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "deploy/locust/locustfile.py"
SCRIPTED = ROOT / "tests/trace_serve/server/scripted_engine.py"
KNOWN = Path(__file__).with_name("known_server.py")
KEY = "load-test-key"


@contextlib.contextmanager
def known_server(*options: str) -> Iterator[str]:
    """A server of known delays; yields its URL."""
    with subprocess.Popen([sys.executable, str(KNOWN), *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@contextlib.contextmanager
def scripted_engine() -> Iterator[str]:
    """The scripted engine of the front-end's tests, asked directly; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPTED), "--port", str(port), "--key", KEY, "--report", "{}"]
    with subprocess.Popen(command) as process:
        try:
            wait_for_port(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def get(url: str, key: str = KEY) -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def write_queries(path: Path, *scripts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": script, "max_tokens": 64}) + "\n" for script in scripts))
    return str(path)


class Run:
    """One run of plain locust, headless, started at once.

    Attributes:
        out: where it leaves its report.
    """

    def __init__(self, host: str, out: Path, *options: str, key: str = KEY, **environment: str) -> None:
        self.out = out
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", host, "--headless"]
        command += ["--only-summary", "--json", "--out", str(out), *options]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TRACE_SERVE_API_KEY": key, **environment},
        )
        self.stdout = self.stderr = ""

    def wait(self) -> int:
        """Its exit code; what it printed is kept."""
        if not self.stderr:
            try:
                self.stdout, self.stderr = self._process.communicate(timeout=400)
            except BaseException:
                self._process.kill()
                raise
        return self._process.returncode

    def report(self) -> LoadReport:
        self.wait()
        assert (self.out / "report.json").exists(), self.stderr
        return read_report(self.out)
