"""Policies change over the real engine: the weights that answer are those that the answer names."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_client import START_TIMEOUT_S

from trace_serve.engine.push import Push
from trace_serve.policy import build_policy
from trace_serve.recipe import Recipe
from trace_serve.server.process import ServerProcess

pytestmark = pytest.mark.engine

ADMIN_KEY = "an-admin-key-0123456789"
BODY = {"messages": [{"role": "user", "content": "count: one two three"}], "temperature": 0, "max_tokens": 12}


class Served:
    """A front-end over a registry of `m@a` and `m@b`, of one shape and different weights; `m@a` is active."""

    def __init__(self, process: ServerProcess, registry: Path, log: Path) -> None:
        self.process, self.registry, self.log = process, registry, log

    @property
    def admin_url(self) -> str:
        events = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        port = next(event["port"] for event in events if event.get("event") == "admin_listening")
        return f"http://127.0.0.1:{port}"

    def admin(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.request(method, self.admin_url + path, json=body, headers=headers, timeout=START_TIMEOUT_S)

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(self.process.url + "/v1/chat/completions", json={**BODY, **body}, timeout=120)

    def text(self) -> tuple[str, str]:
        answer = self.ask()
        assert answer.status_code == 200, answer.text
        return answer.headers["x-trace-policy"], answer.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def served(model_a: Path, model_b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("policies")
    registry = directory / "registry"
    registry.mkdir()
    for version, model in (("a", model_a), ("b", model_b)):
        build_policy(model, registry / version, name="m", version=version, recipe=Recipe())
    log = directory / "server.log"
    process = ServerProcess(
        registry / "a",
        mode="rollout",
        log_path=log,
        engine_log=directory / "engine.log",
        environment={
            "TRACE_SERVE_REGISTRY": str(registry),
            "TRACE_SERVE_ADMIN_PORT": "0",
            "TRACE_SERVE_ADMIN_KEY": ADMIN_KEY,
            "TRACE_SERVE_MAX_TOTAL_TOKENS": "4096",
        },
    )
    with process:
        process.wait_ready(START_TIMEOUT_S)
        yield Served(process, registry, log)


def test_an_exchange_under_load_gives_every_answer_whole_from_the_policy_it_names(served: Served) -> None:
    over = threading.Event()

    def load() -> list[tuple[str, str]]:
        found = []
        while not over.is_set():
            found.append(served.text())
        return found

    alone = served.text()
    assert alone[0] == "m@a"
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(load) for _ in range(3)]
        try:
            done = served.admin("POST", "/admin/activate", {"policy": "m@b", "method": "refit"})
            assert done.status_code == 200, done.text
            after = served.text()
        finally:
            over.set()
        seen = [each for future in running for each in future.result(timeout=120)]
    assert after[0] == "m@b"
    assert {policy for policy, _ in seen} == {"m@a", "m@b"}
    # Both policies answer the same to the same question, alone or in a batch, so a text of mixed weights would show.
    assert set(seen) == {alone, after}
    assert alone[1] != after[1]
    report = httpx.get(served.process.url + "/trace/report", timeout=20).json()
    assert report["policy"]["digest"] == report["policy_digest"]
    assert report["weights"]["label"] == "m@b"


def test_a_cut_shard_is_named_and_the_old_policy_serves_on_under_load(served: Served) -> None:
    active = served.text()
    cut = served.registry / "cut"
    shutil.copytree(served.registry / "a", cut)
    manifest = json.loads((cut / "policy.json").read_text())
    (cut / "policy.json").write_text(json.dumps({**manifest, "version": "cut"}))
    shard = sorted(cut.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    try:
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(served.text) for _ in range(4)]
            failed = served.admin("POST", "/admin/activate", {"policy": "m@cut"})
            assert {future.result(timeout=120) for future in running} == {active}
    finally:
        shutil.rmtree(cut)
    assert failed.status_code == 400
    assert shard.name in failed.json()["error"]["message"]
    assert served.text() == active


def test_a_trainer_pushes_weights_through_the_admin_api(served: Served, model_a: Path) -> None:
    with Push(f"{served.admin_url}/engine", ADMIN_KEY) as push:
        push.directory(model_a, version="step-7")
    answer = served.ask()
    assert answer.headers["x-trace-weight-version"] == "step-7"
    assert answer.headers["x-trace-policy"] == "m@b"
    assert "x-trace-policy-digest" not in answer.headers, "the weights are no longer those of the policy"
    assert served.admin("GET", "/admin/audit").json()["events"][-1]["event"] == "update_weights_from_disk"
    refused = served.admin("POST", "/engine/flush_cache", {})
    assert refused.status_code == 404


def test_rollback_by_a_second_engine_equals_what_that_policy_answered_before(served: Served) -> None:
    again = served.admin("POST", "/admin/activate", {"policy": "m@b", "method": "refit"})
    assert again.status_code == 200, again.text
    exchanged = served.text()
    done = served.admin("POST", "/admin/activate", {"policy": "m@a", "method": "switch"})
    assert done.status_code == 200, done.text
    assert served.text()[0] == "m@a"
    back = served.admin("POST", "/admin/rollback")
    assert back.status_code == 200, back.text
    assert served.text() == exchanged
