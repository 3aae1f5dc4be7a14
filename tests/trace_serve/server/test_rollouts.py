"""Rollout records over the front-end and the scripted engine, and the store's bounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness import Running

from trace_serve.server.errors import ApiError
from trace_serve.server.rollouts.store import RolloutStore

CHAT = "/v1/chat/completions"


def body(script: str = "tokens=1", **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script}], **fields}


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A front-end without keys, so that every bearer is a client of its own."""
    with Running(tmp_path_factory.mktemp("open"), rollout_max_count=4) as running:
        yield running


def ask(running: Running, key: str, **fields: object) -> httpx.Response:
    return httpx.post(running.url + CHAT, json=body(**fields), headers={"authorization": f"Bearer {key}"}, timeout=20)


def read(running: Running, rollout: str, key: str, suffix: str = "", method: str = "GET") -> httpx.Response:
    url = f"{running.url}/v1/rollouts/{rollout}{suffix}"
    return httpx.request(method, url, headers={"authorization": f"Bearer {key}"}, timeout=20)


@pytest.mark.parametrize("stream", [False, True])
def test_a_recorded_answer_is_read_back_with_its_tokens_and_policy(client: httpx.Client, stream: bool) -> None:
    answer = client.post(CHAT, json=body("tokens=2", return_rollout=True, stream=stream))
    record = client.get(f"/v1/rollouts/{answer.headers['x-trace-rollout']}").json()
    (choice,) = record["choices"]
    assert bytes(choice["prompt_token_ids"]).decode() == "<user>tokens=2\n<assistant>"
    assert len(choice["output_logprobs"]) == len(choice["output_token_ids"]) > 0
    assert choice["finish_reason"] == "stop"
    assert choice["hints"] is None
    assert record["policy"]["name"] == "scripted"
    assert record["verdict_id"] == "sha256:verdict"
    assert record["weight_version"] == choice["weight_version_spans"]["sampled"][0][2]


def test_an_answer_that_was_not_asked_to_be_recorded_has_no_rollout(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=body())
    assert "x-trace-rollout" not in answer.headers
    assert client.get(f"/v1/rollouts/{answer.headers['x-request-id']}").json()["error"]["code"] == "rollout_unknown"


def test_the_record_tells_the_state_of_each_choices_hints(shared: Running, client: httpx.Client) -> None:
    answer = client.post(CHAT, json=body(trace_hints=True, n=2))
    rollout = answer.headers["x-trace-rollout"]
    (shared.hint_dir / f"{rollout}_0-1.safetensors").write_bytes(b"x" * 99)
    first, second = (choice["hints"] for choice in client.get(f"/v1/rollouts/{rollout}").json()["choices"])
    assert first == {"status": "absent"}
    assert second == {"status": "ready", "bytes": 99, "path": f"/v1/rollouts/{rollout}/hints?choice=1"}
    assert client.get(second["path"]).content == b"x" * 99


def test_a_failed_answer_leaves_no_record_and_says_so(client: httpx.Client) -> None:
    streamed = client.post(CHAT, json=body("tokens=4 error_after=2", return_rollout=True, stream=True))
    gone = client.get(f"/v1/rollouts/{streamed.headers['x-trace-rollout']}")
    assert gone.status_code == 410
    assert gone.json()["error"]["code"] == "rollout_failed"
    assert "generation_failed" in gone.json()["error"]["message"]


def test_a_rollout_that_still_runs_is_not_there_yet(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=body("tokens=400 delay=0.05", return_rollout=True, stream=True)) as answer:
        pieces = answer.iter_bytes()  # kept: an iterator that is dropped closes the stream
        next(pieces)
        running = client.get(f"/v1/rollouts/{answer.headers['x-trace-rollout']}")
    assert (running.status_code, running.json()["error"]["code"]) == (404, "rollout_running")


def test_another_key_sees_neither_record_nor_hints(open_server: Running) -> None:
    rollout = ask(open_server, "mine", trace_hints=True).headers["x-trace-rollout"]
    (open_server.hint_dir / f"{rollout}.safetensors").write_bytes(b"hints")
    assert read(open_server, rollout, "mine").status_code == 200
    assert read(open_server, rollout, "theirs").json()["error"]["code"] == "rollout_unknown"
    for method in ("GET", "DELETE"):
        assert read(open_server, rollout, "theirs", "/hints", method).status_code == 404
    assert read(open_server, rollout, "mine", "/hints").content == b"hints"


def test_old_records_make_room_and_say_that_they_did(open_server: Running) -> None:
    first = ask(open_server, "k", return_rollout=True).headers["x-trace-rollout"]
    for _ in range(4):
        last = ask(open_server, "k", return_rollout=True).headers["x-trace-rollout"]
    gone = read(open_server, first, "k")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "rollout_evicted")
    assert read(open_server, last, "k").status_code == 200


def test_hints_are_removed_when_they_are_acknowledged(shared: Running, client: httpx.Client) -> None:
    rollout = client.post(CHAT, json=body(trace_hints=True)).headers["x-trace-rollout"]
    url, file = f"/v1/rollouts/{rollout}/hints", shared.hint_dir / f"{rollout}.safetensors"
    file.write_bytes(b"hints")
    assert client.get(url, headers={"range": "bytes=0-1"}, params={"ack": 1}).status_code == 206
    assert client.get(url).content == b"hints"
    assert client.get(url, params={"ack": 1}).content == b"hints"
    deadline = time.monotonic() + 10
    while file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    file.write_bytes(b"again")
    assert client.delete(url).status_code == 204
    assert not file.exists()
    assert client.delete(url).json()["error"]["code"] == "hints_not_found"
    assert client.get(url, params={"ack": "yes"}).json()["error"]["param"] == "ack"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock, **bounds: Any) -> RolloutStore:
    return RolloutStore(**{"max_count": 3, "max_bytes": 1000, "ttl_s": 10.0, **bounds}, clock=clock)


def gone(records: RolloutStore, name: str, owner: str = "me") -> str | None:
    with pytest.raises(ApiError) as caught:
        records.get(name, owner)
    return caught.value.code


def test_the_store_stays_within_its_bytes_and_its_age() -> None:
    clock = Clock()
    records = store(clock)
    for name in "abc":
        records.begin(name, "me")
        records.finish(name, {"text": "x" * 400})
    assert len(records) == 2
    assert records.size_bytes < 1000
    assert gone(records, "a") == "rollout_evicted"
    clock.now = 10.5
    assert gone(records, "c") == "rollout_expired"
    assert (len(records), records.size_bytes) == (0, 0)


def test_a_record_larger_than_the_whole_store_evicts_nothing() -> None:
    records = store(Clock())
    records.begin("small", "me")
    records.finish("small", {"text": "x"})
    records.begin("large", "me")
    records.finish("large", {"text": "x" * 2000})
    assert records.get("small", "me") == {"text": "x"}
    assert gone(records, "large") == "rollout_too_large"


def test_what_is_remembered_of_gone_records_is_bounded_too() -> None:
    records = store(Clock())
    for index in range(100):
        records.begin(str(index), "me")
        records.fail(str(index), "cut")
    assert gone(records, "99") == "rollout_failed"
    assert gone(records, "0") == "rollout_unknown"
    assert gone(records, "99", "somebody else") == "rollout_unknown"
