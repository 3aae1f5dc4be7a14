"""Policies go in and out of service while requests run; what fails leaves what served before."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from policy_world import ADMIN_KEY, World
from typer.testing import CliRunner

from trace_serve.errors import ConfigError
from trace_serve.recipe import PRESETS
from trace_serve.server.admin import cli
from trace_serve.server.policies.audit import verify


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two policies that one engine can exchange, and one of another architecture."""
    world = World(tmp_path_factory.mktemp("world"))
    world.add("a@1", weight=1.0)
    world.add("a@2", weight=2.0)
    world.add("b@1", hidden_size=128)
    world.start("a@1")
    yield world
    world.stop()


@pytest.fixture
def world(shared_world: World) -> World:
    """The shared world with `a@1` active in a healthy engine, and nothing tried beside it."""
    state = shared_world.admin("GET", "/admin/state").json()
    if state["candidate"]:
        assert shared_world.admin("DELETE", "/admin/candidate").status_code == 200
    if not state["active"] or state["active"]["policy"] != "a@1":
        assert shared_world.admin("POST", "/admin/activate", {"policy": "a@1", "method": "switch"}).status_code == 200
    wait_for(lambda: shared_world.ask().status_code == 200)
    shared_world.script("a@1", refusal=None, update_delay=0.0, quarantined_by_update=False)
    return shared_world


def wait_for(check: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def served_by(answer: httpx.Response) -> str:
    """The policy of an answer, whose label and whose text come from the same weights."""
    assert answer.status_code == 200, answer.text
    if answer.text.startswith("data:"):
        chunks = [json.loads(part[5:]) for part in answer.text.strip().split("\n\n") if part != "data: [DONE]"]
        digests = {chunk["weights"] for chunk in chunks if "weights" in chunk}
    else:
        digests = {answer.json()["weights"]}
    assert digests == {answer.headers["x-trace-policy-digest"]}
    return answer.headers["x-trace-policy"]


def test_a_policy_of_the_same_shape_is_exchanged_in_the_running_engine(world: World) -> None:
    pid = world.engine("a@1")["pid"]
    done = world.admin("POST", "/admin/activate", {"policy": "a@2"})
    assert done.status_code == 200, done.text
    assert done.json()["active"]["policy"] == "a@2"
    assert served_by(world.ask()) == "a@2"
    assert world.ask().headers["x-trace-weight-version"] == "a@2"
    assert world.engine("a@1")["pid"] == pid


def test_a_policy_of_another_shape_gets_an_engine_of_its_own(world: World) -> None:
    refused = world.admin("POST", "/admin/activate", {"policy": "b", "method": "refit"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "method")
    done = world.admin("POST", "/admin/activate", {"policy": "b"})
    assert done.json()["active"]["policy"] == "b@1"
    assert served_by(world.ask()) == "b@1"
    assert world.admin("POST", "/admin/rollback").json()["active"]["policy"] == "a@1"
    assert served_by(world.ask()) == "a@1"


@pytest.mark.parametrize("target", ["a@2", "b@1"], ids=["refit", "switch"])
def test_no_answer_under_load_mixes_policies_without_a_label(world: World, target: str) -> None:
    world.script("a@1", update_delay=0.5)
    over = threading.Event()

    def load(index: int) -> list[str]:
        found = []
        while not over.is_set():
            found.append(served_by(world.ask("tokens=5 delay=0.02", stream=index % 2 == 0)))
        return found

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(load, index) for index in range(6)]
        try:
            time.sleep(0.3)
            assert world.admin("POST", "/admin/activate", {"policy": target}).status_code == 200
            time.sleep(0.5)
        finally:
            over.set()
        seen = [future.result(timeout=60) for future in running]
    for labels in seen:
        assert labels == sorted(labels, key=lambda label: label == target), "an old policy answered after a new one"
    assert {label for labels in seen for label in labels} == {"a@1", target}


def test_a_request_that_does_not_finish_is_cut_with_an_error_not_a_finish_reason(tmp_path: Path) -> None:
    world = World(tmp_path, drain_s=0.3)
    world.add("a@1", weight=1.0)
    world.add("a@2", weight=2.0)
    world.start("a@1")
    try:
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(world.ask, "tokens=400 delay=0.05", stream=True)
            wait_for(lambda: world.seen("a@1")["running"] == 1)
            assert world.admin("POST", "/admin/activate", {"policy": "a@2"}).status_code == 200
            last = long.result().text.strip().rsplit("\n\n", 1)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "policy_switched"
        assert "[DONE]" not in long.result().text
    finally:
        world.stop()


def test_a_refused_update_leaves_the_old_policy_serving(world: World) -> None:
    world.script("a@1", refusal="shard model.safetensors is cut")
    failed = world.admin("POST", "/admin/activate", {"policy": "a@2"})
    assert failed.status_code == 502
    assert "model.safetensors is cut" in failed.json()["error"]["message"]
    assert served_by(world.ask()) == "a@1"
    assert world.admin("GET", "/admin/state").json()["active"]["policy"] == "a@1"


def test_an_engine_left_with_weights_of_two_versions_is_replaced_under_the_old_policy(world: World) -> None:
    pid = world.engine("a@1")["pid"]
    world.script("a@1", quarantined_by_update=True)
    assert world.admin("POST", "/admin/activate", {"policy": "a@2"}).status_code == 502
    wait_for(lambda: world.engine("a@1")["pid"] != pid and world.ask().status_code == 200)
    assert served_by(world.ask()) == "a@1"


def test_a_policy_with_a_cut_shard_is_refused_by_name_and_the_old_one_serves(world: World) -> None:
    shard = world.registry / "a-2" / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    failed = world.admin("POST", "/admin/activate", {"policy": "a@2"})
    shard.write_bytes(whole)
    assert failed.status_code == 400
    assert "model.safetensors" in failed.json()["error"]["message"]
    assert served_by(world.ask()) == "a@1"


def test_an_engine_that_does_not_start_leaves_the_old_policy_serving(world: World) -> None:
    directory = world.directory / "engine-b@1"
    directory.mkdir(exist_ok=True)
    (directory / "fail-start").touch()
    pid = world.engine("a@1")["pid"]
    failed = world.admin("POST", "/admin/activate", {"policy": "b@1"})
    (directory / "fail-start").unlink()
    assert failed.status_code == 502
    assert served_by(world.ask()) == "a@1"
    assert world.engine("a@1")["pid"] == pid


def test_deactivating_ends_readiness_with_the_reason(world: World) -> None:
    assert world.admin("POST", "/admin/deactivate").json()["active"] is None
    refused = world.ask()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_policy"
    assert world.admin("POST", "/admin/deactivate").status_code == 400
    assert world.admin("POST", "/admin/activate", {"policy": "a@1"}).status_code == 200
    assert served_by(world.ask()) == "a@1"


def test_a_canary_answers_its_share_and_is_promoted_or_dropped(world: World) -> None:
    tried = world.admin("POST", "/admin/candidate", {"policy": "b@1", "trial": "canary", "share": 0.5})
    assert tried.json()["candidate"]["share"] == 0.5, tried.text
    labels = [served_by(world.ask()) for _ in range(40)]
    assert 5 <= labels.count("b@1") <= 35  # of a binomial of 40 at one half: one in 100,000 lies outside
    assert len({served_by(world.ask(user="the same user")) for _ in range(10)}) == 1
    assert {served_by(world.ask(model="b@1")) for _ in range(5)} == {"b@1"}
    assert {served_by(world.ask(model="a@1")) for _ in range(5)} == {"a@1"}
    models = httpx.get(world.process.url + "/v1/models", headers={"authorization": "Bearer a-client-key"}).json()
    assert [each["id"] for each in models["data"]] == ["a", "b"]
    assert world.admin("POST", "/admin/candidate", {"policy": "a@2", "trial": "canary", "share": 1}).status_code == 400
    world.admin("POST", "/admin/candidate", {"policy": "b@1", "trial": "canary", "share": 0.0})
    assert {served_by(world.ask()) for _ in range(10)} == {"a@1"}
    assert world.admin("POST", "/admin/promote").json()["active"]["policy"] == "b@1"
    assert {served_by(world.ask()) for _ in range(5)} == {"b@1"}
    assert world.admin("POST", "/admin/promote").status_code == 400


def test_a_shadow_gets_copies_whose_answers_are_stored_and_returned_to_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, request_log_redact="none")
    world.add("a@1")
    world.add("b@1", hidden_size=128)
    world.start("a@1")
    try:
        tried = world.admin("POST", "/admin/candidate", {"policy": "b@1", "trial": "shadow", "share": 1.0})
        assert tried.status_code == 200, tried.text
        asked = [world.ask("tokens=2", stream=index % 2 == 0) for index in range(6)]
        assert {served_by(answer) for answer in asked} == {"a@1"}
        ids = {answer.headers["x-request-id"] for answer in asked}
        directory = world.state_dir / "shadow" / "b@1"
        wait_for(lambda: all(len(lines(directory / f"{arm}.jsonl")) == 6 for arm in ("active", "candidate")))
        active, candidate = (lines(directory / f"{arm}.jsonl") for arm in ("active", "candidate"))
        assert {line["id"] for line in active} == {line["id"] for line in candidate} == ids
        assert {line["policy"] for line in active} == {"a@1"}
        assert {line["policy"] for line in candidate} == {"b@1"}
        texts = {line["response"]["choices"][0]["message"]["content"] for line in active + candidate}
        assert len(texts) == 1
        assert {each["rid"] for each in world.seen("b@1")["seen"]} == {f"shadow-{line['id']}" for line in candidate}
        # A shadow that fails harms nobody.
        os.kill(world.engine("b@1")["pid"], signal.SIGKILL)
        assert served_by(world.ask()) == "a@1"
        assert world.admin("DELETE", "/admin/candidate").json()["candidate"] is None
    finally:
        assert world.stop() == 0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_texts_are_stored_only_after_their_redaction_was_chosen(world: World) -> None:
    refused = world.admin("POST", "/admin/candidate", {"policy": "b@1", "trial": "shadow", "share": 1.0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_log_redact")
    assert world.admin("GET", "/admin/state").json()["candidate"] is None


def test_the_command_line_drives_the_admin_api(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_SERVE_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("TRACE_SERVE_ADMIN_URL", f"http://127.0.0.1:{world.event('admin_listening')['port']}")
    run = CliRunner()
    done = run.invoke(cli.app, ["activate", "a@2"])
    assert done.exit_code == 0, done.output
    assert "a@2 is active" in done.output
    listed = run.invoke(cli.app, ["list"])
    assert [row.split()[:2] for row in listed.output.splitlines()[1:4]] == [
        ["a@1", "previous"], ["a@2", "active"], ["b@1", "-"]
    ]  # fmt: skip
    assert "a@1 is active" in run.invoke(cli.app, ["rollback"]).output
    head = json.loads(run.invoke(cli.app, ["state"]).output)["audit_head"]
    log = str(world.state_dir / "audit.jsonl")
    assert run.invoke(cli.app, ["verify-audit", log, "--head", head]).exit_code == 0
    assert isinstance(run.invoke(cli.app, ["verify-audit", log, "--head", "sha256:0"]).exception, ConfigError)
    assert isinstance(run.invoke(cli.app, ["activate", "nobody"]).exception, ConfigError)


def test_a_canary_whose_engine_dies_for_good_is_dropped_and_the_active_policy_serves(tmp_path: Path) -> None:
    world = World(tmp_path, max_restarts=0)
    world.add("a@1")
    world.add("b@1", hidden_size=128)
    world.start("a@1")
    try:
        world.admin("POST", "/admin/candidate", {"policy": "b@1", "trial": "canary", "share": 1.0})
        assert served_by(world.ask()) == "b@1"
        os.kill(world.engine("b@1")["pid"], signal.SIGKILL)
        wait_for(lambda: world.admin("GET", "/admin/state").json()["candidate"] is None)
        assert served_by(world.ask()) == "a@1"
    finally:
        world.stop()


def test_one_operation_at_a_time(world: World) -> None:
    world.script("a@1", update_delay=1.5)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(world.admin, "POST", "/admin/activate", {"policy": "a@2"})
        wait_for(lambda: world.admin("GET", "/admin/state").json()["operation"] is not None)
        second = world.admin("POST", "/admin/activate", {"policy": "b@1"})
        assert second.status_code == 409
        assert "activate of a@2" in second.json()["error"]["message"]
        assert first.result().status_code == 200


def test_the_admin_api_has_a_key_of_its_own(world: World) -> None:
    for path in ("/admin/state", "/admin/policies", "/admin/audit"):
        assert world.admin("GET", path, key="a-client-key").status_code == 401
    assert world.admin("POST", "/engine/begin_weight_update", {}, key="wrong").status_code == 401
    answer = httpx.get(world.process.url + "/admin/state", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "policy"),
        ({"policy": "a@1", "method": "magic"}, "method"),
        ({"policy": "../a-1"}, "policy"),
        ({"policy": "nobody"}, "policy"),
        ({"policy": "a"}, "policy"),
        ({"policy": "a@1"}, "policy"),
        ({"policy": "a@2", "extra": 1}, "extra"),
    ],
)
def test_bad_activations_name_the_field(world: World, body: dict[str, Any], param: str) -> None:
    refused = world.admin("POST", "/admin/activate", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("share", [-0.1, 1.1, "0.5", None])
def test_a_share_outside_its_range_is_refused(world: World, share: object) -> None:
    refused = world.admin("POST", "/admin/candidate", {"policy": "a@2", "trial": "canary", "share": share})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "share"


def test_the_active_policy_comes_back_after_a_restart_of_the_server(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add("a@1")
    world.add("a@2", weight=2.0)
    world.start("a@1")
    assert world.admin("POST", "/admin/activate", {"policy": "a@2"}).status_code == 200
    assert world.stop() == 0
    world.start()
    wait_for(lambda: world.ask().status_code == 200)
    assert served_by(world.ask()) == "a@2"
    events = [(each["event"], each["phase"], each["policy"]) for each in world.audit()]
    assert events == [("activate", "begin", "a@2"), ("activate", "done", "a@2")] * 2
    assert verify(world.state_dir / "audit.jsonl").head == world.admin("GET", "/admin/audit").json()["head"]
    assert world.stop() == 0


class TestProduction:
    def test_only_a_passing_verdict_about_exactly_this_policy_activates(self, tmp_path: Path) -> None:
        from eval_gate.stats.rule import Outcome

        world = World(tmp_path, mode="production", request_log_redact="none")
        good, other = world.add("a@1"), world.add("a@2", weight=2.0)
        blocked = world.add("a@3", weight=3.0)
        world.add("a@4", weight=4.0)
        world.sign(good)
        world.sign(other)
        world.sign(blocked, outcome=Outcome.BLOCK, exit_code=1)
        world.start()
        try:
            for label in ("a@3", "a@4"):
                refused = world.admin("POST", "/admin/activate", {"policy": label})
                assert refused.status_code == 403, refused.text
                assert refused.json()["error"]["code"] == "verdict_refused"
            assert world.ask().status_code == 503
            assert world.admin("POST", "/admin/activate", {"policy": "a@1"}).status_code == 200
            answer = world.ask()
            assert served_by(answer) == "a@1"
            listed = {row["policy"]: row for row in world.admin("GET", "/admin/policies").json()["policies"]}
            assert answer.headers["x-trace-verdict"] == listed["a@1"]["verdict"]["id"]
            assert [listed[f"a@{n}"]["verdict"]["authorizes"] for n in (1, 2, 3, 4)] == [True, True, False, False]
            assert "expected PASS" in listed["a@3"]["verdict"]["reason"]
            shown = world.admin("GET", "/admin/policies/a@1/verdict").json()
            assert shown["verdict"]["policy_name"] == "a"
            # Files that change after the verdict was signed are not activated.
            (other.path / "README.md").write_text("more")
            refused = world.admin("POST", "/admin/activate", {"policy": "a@2"})
            assert refused.status_code == 403
            assert "digest" in refused.json()["error"]["message"]
            assert served_by(world.ask()) == "a@1"
            # A canary answers clients, so it needs a verdict; a shadow answers nobody.
            body = {"policy": "a@4", "share": 1.0}
            assert world.admin("POST", "/admin/candidate", {**body, "trial": "canary"}).status_code == 403
            assert world.admin("POST", "/admin/candidate", {**body, "trial": "shadow"}).status_code == 200
            assert served_by(world.ask()) == "a@1"
            assert world.admin("POST", "/admin/promote").status_code == 400
            refused = world.admin("POST", "/engine/begin_weight_update", {})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_in_production")
        finally:
            world.stop()


def test_an_unequal_recipe_is_never_exchanged_in_a_running_engine(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add("a@1")
    world.add("a@2", recipe=PRESETS["paper"])
    world.start("a@1")
    try:
        assert world.admin("POST", "/admin/activate", {"policy": "a@2"}).status_code == 200
        assert (world.directory / "engine-a@2").exists()
    finally:
        world.stop()
