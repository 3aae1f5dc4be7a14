"""What bench_server.py measures: servers as processes, each on one core of its own, and the CPU time they took."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LITELLM = "litellm[proxy]==1.108.7"
SMG = "smg==1.13.0"
START_TIMEOUT_S = 240.0
CLIENT_KEY = "sk-" + secrets.token_hex(32)
"""For the gateways that ask for one: LiteLLM does not start without."""

SERVER_CORE, LOAD_CORE = (cores := sorted(os.sched_getaffinity(0)))[0], cores[-1]


@dataclass
class Target:
    """One way to the same upstream.

    Attributes:
        name: as in the table.
        url: of the chat route.
        model: what requests call the model.
        key: bearer key, or none.
        processes: what its CPU time is taken of, children included; none for a null upstream itself.
    """

    name: str
    url: str
    model: str
    key: str | None = None
    processes: tuple[psutil.Process, ...] = field(default=(), repr=False)

    def cpu_s(self) -> float:
        """CPU seconds of these processes so far."""
        families = [(each, *each.children(recursive=True)) for each in self.processes]
        spent = [member.cpu_times() for family in families for member in family]
        return float(sum(times.user + times.system for times in spent))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(
    command: list[str], log: Path, *, core: int | None, environment: dict[str, str] | None = None
) -> Iterator[psutil.Process]:
    """A server as a child in a session of its own, pinned to a core; ended with all its children."""
    pin = None if core is None else (lambda: os.sched_setaffinity(0, {core}))
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=pin,
        )
    try:
        yield psutil.Process(child.pid)
    finally:
        for number, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
                break


def wait_for(check: Callable[[], bool], process: psutil.Process, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not check():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"it ended early:\n{log.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready in {START_TIMEOUT_S:g} s:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def answers(url: str, body: dict[str, Any] | None = None) -> Callable[[], bool]:
    """A check whether a GET, or a POST of a body, is answered with 200."""
    data = None if body is None else json.dumps(body).encode()

    def check() -> bool:
        request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    return check


@contextlib.contextmanager
def null_upstream(directory: Path, tokens: int, interval_ms: float, report: dict[str, Any]) -> Iterator[str]:
    """The base URL of a null upstream."""
    port, log = free_port(), directory / f"upstream-{interval_ms:g}.log"
    script = Path(__file__).with_name("bench_server_upstream.py")
    command = [sys.executable, str(script), "--port", str(port), "--tokens", str(tokens)]
    command += ["--interval-ms", str(interval_ms), "--report", json.dumps(report)]
    with running(command, log, core=LOAD_CORE) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(answers(url + "/v1/models"), process, log)
        yield url


@contextlib.contextmanager
def trace_serve(
    policy: Path, directory: Path, upstream: str, model: str, *, key: str | None = None, core: int | None
) -> Iterator[Target]:
    """`trace-serve serve POLICY --engine-url UPSTREAM`."""
    port, log = free_port(), directory / f"trace-serve-{free_port()}.log"
    command = [sys.executable, "-m", "trace_serve.server", str(policy), "--mode", "rollout", "--port", str(port)]
    command += ["--engine-url", upstream]
    if key is not None:
        key_file = directory / "engine.key"
        key_file.write_text(key)
        command += ["--engine-key-file", str(key_file)]
    with running(command, log, core=core, environment={"TRACE_SERVE_API_KEY": CLIENT_KEY}) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(answers(url + "/health/ready"), process, log)
        yield Target("trace-serve", url + "/v1/chat/completions", model, CLIENT_KEY, (process,))


@contextlib.contextmanager
def litellm(venv: Path, directory: Path, upstream: str, model: str) -> Iterator[Target]:
    """LiteLLM's proxy with one worker, no database and no callbacks."""
    port, log, config = free_port(), directory / "litellm.log", directory / "litellm.yaml"
    parameters = {"model": f"openai/{model}", "api_base": upstream + "/v1", "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": model, "litellm_params": parameters}]}))
    command = [str(venv / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num_workers", "1", "--telemetry", "False"]
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": CLIENT_KEY}
    with running(command, log, core=SERVER_CORE, environment=environment) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(answers(url + "/health/readiness"), process, log)
        yield Target("LiteLLM", url + "/v1/chat/completions", model, CLIENT_KEY, (process,))


@contextlib.contextmanager
def smg(venv: Path, directory: Path, upstream: str, model: str) -> Iterator[Target]:
    """SGLang's model gateway, written in Rust."""
    port, log = free_port(), directory / f"smg-{free_port()}.log"
    command = [str(venv / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    command += ["--worker-urls", upstream, "--policy", "round_robin", "--prometheus-port", str(free_port())]
    with running(command, log, core=SERVER_CORE) as process:
        url = f"http://127.0.0.1:{port}"
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        wait_for(answers(url + "/v1/chat/completions", body), process, log)
        yield Target("smg", url + "/v1/chat/completions", model, processes=(process,))


@contextlib.contextmanager
def venv_with(requirement: str, directory: Path) -> Iterator[Path]:
    """A virtual environment with one package, removed afterwards; wheels come from uv's cache the second time."""
    path = directory / requirement.partition("[")[0].partition("=")[0]
    uv = str(Path(sys.executable).with_name("uv"))
    try:
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(path)], check=True)
        python = str(path / "bin" / "python")
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, requirement], check=True)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
