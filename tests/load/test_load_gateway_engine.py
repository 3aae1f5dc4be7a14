"""Two real engines behind SGLang's gateway, the front-end before it, and one engine killed under load."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from engine_client import START_TIMEOUT_S
from load_runs import Run, get, wait_for_port
from remote_engines import wait_until

from trace_serve.engine.launch import EngineProcess
from trace_serve.hints import wire
from trace_serve.policy.manifest import Policy
from trace_serve.server.process import ServerProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the load extra is not installed"),
]

CHAT = {"messages": [{"role": "user", "content": "Where is Paris?"}], "max_tokens": 8, "temperature": 0}
KEY = "client-key-0123456789"


@pytest.fixture
def second_engine(fp4_engine: EngineProcess, tmp_path: Path) -> Iterator[EngineProcess]:
    """Like the first, with its key and its hint directory, as two engines of one deployment on a shared file system."""
    engine = EngineProcess(replace(fp4_engine.config, log_path=tmp_path / "second.log"))
    engine.api_key = fp4_engine.api_key
    engine.start()
    try:
        engine.wait_ready(START_TIMEOUT_S)
        yield engine
    finally:
        engine.stop()


@contextlib.contextmanager
def gateway(*engines: EngineProcess) -> Iterator[str]:
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(ports[0])]
    command += ["--prometheus-port", str(ports[1]), "--worker-urls", *(engine.url for engine in engines)]
    command += ["--api-key", engines[0].api_key, "--policy", "round_robin", "--disable-retries", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(ports[0])
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def front_end(policy: Policy, url: str, engine: EngineProcess, directory: Path) -> Iterator[ServerProcess]:
    key_file = directory / "engine.key"
    key_file.write_text(engine.api_key)
    environment = {"TRACE_SERVE_ENGINE_URLS": url, "TRACE_SERVE_ENGINE_KEY_FILE": str(key_file)}
    environment |= {"TRACE_SERVE_ENGINE_UNVERIFIED": "true"}
    with ServerProcess(
        policy.path,
        mode="rollout",
        hint_dir=engine.config.hint_dir,
        api_key=KEY,
        environment=environment,
        log_path=directory / "server.log",
    ) as server:
        server.wait_ready(120)
        yield server


def running(engine: EngineProcess) -> int:
    return sum(each["num_running_reqs"] for each in get(engine.url + "/v1/loads", engine.api_key)["loads"])


def kill_under_load(engine: EngineProcess) -> None:
    wait_until(lambda: running(engine) > 0, "the engine has a request", 60)
    assert engine.pid is not None
    os.killpg(engine.pid, signal.SIGKILL)


def test_an_engine_killed_behind_the_gateway_loses_no_request_without_an_error_and_no_hints(
    fp4_policy: Policy, fp4_engine: EngineProcess, second_engine: EngineProcess, tmp_path: Path
) -> None:
    with (
        gateway(fp4_engine, second_engine) as url,
        front_end(fp4_policy, url, fp4_engine, tmp_path) as server,
        httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as client,
    ):
        # In turns, so the hints of one of these were written by the engine that is lost.
        answers = [client.post("/v1/chat/completions", json={**CHAT, "trace_hints": True}) for _ in range(4)]
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        rollouts = [answer.headers["x-trace-rollout"] for answer in answers]

        options = ["--arrivals", "constant", "--rate", "2", "--duration", "12s", "--max-lag", "60"]
        options += ["--max-tokens", "24", "--hints", "fetch", "--drain", "120s"]
        run = Run(server.url, tmp_path / "out", *options, key=KEY)
        try:
            kill_under_load(second_engine)
        finally:
            report = run.report()
        assert report.offered == 24
        assert sum(report.outcomes.values()) == 24
        assert set(report.outcomes) <= {"ok", "failed", "refused"}, report.outcomes
        assert report.outcomes["failed"] >= 1
        assert report.outcomes["ok"] >= 6
        assert all(report.reasons), report.reasons
        hints = report.latency("hints")
        assert hints is not None
        assert hints.count == report.outcomes["ok"]

        for rollout in rollouts:
            answer = client.get(f"/v1/rollouts/{rollout}/hints")
            assert answer.status_code == 200, answer.text
            assert wire.from_bytes(answer.content, expect_recipe_id=fp4_policy.recipe.recipe_id).rows > 0
        wait_until(lambda: client.post("/v1/chat/completions", json=CHAT).status_code == 200, "it serves on", 60)
