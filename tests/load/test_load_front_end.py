"""Load on the real front-end over scripted engines: versions are named, and nothing is lost unnoticed."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness import DIGEST, Running
from load_runs import Run, write_queries
from policy_world import ADMIN_KEY, API_KEY, World
from remote_engines import RemoteScript, ask, front_end

pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the load extra is not installed")

STEADY = ["--arrivals", "constant", "--max-lag", "60"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.add("mine@1", weight=1.0)
    made.add("mine@2", weight=2.0)
    made.start("mine@1")
    yield made
    made.stop()


def test_swaps_under_load_are_timed_and_both_versions_are_named(world: World, tmp_path: Path) -> None:
    assert world.process is not None
    queries = write_queries(tmp_path / "queries.jsonl", "tokens=4 delay=0.02")
    options = ["--rate", "6", "--duration", "8s", "--queries", queries]
    swap = ["--swap-url", f"http://127.0.0.1:{world.event('admin_listening')['port']}", "--swap-every", "3s"]
    swap += ["--swap-policies", "mine@2, mine@1"]
    run = Run(
        world.process.url, tmp_path / "out", *STEADY, *options, *swap, key=API_KEY, TRACE_SERVE_ADMIN_KEY=ADMIN_KEY
    )
    report = run.report()
    assert report.outcomes == {"ok": 48}, run.stderr
    assert [(swap.policy, swap.fault) for swap in report.swaps] == [("mine@2", ""), ("mine@1", "")]
    assert {each.policy for each in report.versions} == {"mine@1", "mine@2"}
    assert len({each.digest for each in report.versions} - {""}) == 2
    assert any("more than one policy digest answered" in note for note in report.notes)
    audit = [entry for entry in world.audit() if "load-test" in str(entry)]
    assert audit


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Running, RemoteScript, RemoteScript]]:
    with (
        RemoteScript() as one,
        RemoteScript() as two,
        front_end(tmp_path, [one.url, two.url]) as running,
    ):
        yield running, one, two


def test_an_engine_killed_under_load_loses_no_request_without_an_error(
    engines: tuple[Running, RemoteScript, RemoteScript], tmp_path: Path
) -> None:
    running, one, two = engines
    answer = ask(running, trace_hints=True)
    rollout = answer.headers["x-trace-rollout"]
    (running.hint_dir / f"{rollout}.safetensors").write_bytes(b"hints of the engine that will be lost")
    queries = write_queries(tmp_path / "queries.jsonl", "tokens=20 delay=0.05")
    run = Run(running.url, tmp_path / "out", *STEADY, "--rate", "6", "--duration", "8s", "--queries", queries)
    victim = killed_under_load(one, two)
    report = run.report()
    assert not victim.alive
    outcomes = report.outcomes
    assert report.offered == 48
    assert sum(outcomes.values()) == 48
    assert set(outcomes) <= {"ok", "failed", "refused"}
    assert outcomes["failed"] >= 1
    assert outcomes["ok"] >= 24
    assert all("engine" in reason for reason in report.reasons), report.reasons
    assert {each.digest for each in report.versions} == {DIGEST}
    assert httpx.get(f"{running.url}/v1/rollouts/{rollout}/hints", timeout=10).content.startswith(b"hints of")
    assert ask(running).status_code == 200


def killed_under_load(one: RemoteScript, two: RemoteScript) -> RemoteScript:
    """Kills the first engine that has two streams running; the other stays."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for engine in (one, two):
            if engine.seen()["running"] >= 2:
                engine.stop()
                return engine
        threading.Event().wait(0.05)
    raise AssertionError("no engine was under load")


def test_a_hint_file_that_does_not_come_misses_the_slo(shared: Running, tmp_path: Path) -> None:
    """The scripted engine writes no hints; the front-end answers 404, and that is counted."""
    queries = write_queries(tmp_path / "queries.jsonl", "tokens=2")
    options = ["--rate", "2", "--duration", "1s", "--queries", queries, "--hints", "fetch", "--max-tokens", "3"]
    run = Run(shared.url, tmp_path / "out", *STEADY, *options, key=str(shared.api_key))
    report = run.report()
    assert run.wait() == 1
    assert report.outcomes == {"ok": 2}
    (reason,) = report.reasons
    assert reason.startswith("hints: status 404")
    assert any(check.name.startswith("hint files") and not check.met for check in report.checks)
    (version,) = report.versions
    assert (version.digest, version.verdict, version.policy) == (DIGEST, "sha256:verdict", "scripted@1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("front-end"), api_key="a-client-key") as running:
        yield running
