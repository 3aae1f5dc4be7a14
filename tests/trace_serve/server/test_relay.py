"""What reaches the client, and what reaches the engine, over real sockets with a scripted upstream.

The upstream samples nothing: it stands for an engine that is slow, cut, or dying at a moment of the test's choosing.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness import Running
from scripted_engine import SERVED_NAME, TEXT

from trace_serve.hints.sinks import marks

CHAT = "/v1/chat/completions"


def body(script: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script}], **fields}


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def wait_until(check: Any, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def assert_serves(client: httpx.Client) -> None:
    assert client.post(CHAT, json=body("tokens=1")).status_code == 200


@pytest.mark.parametrize("script", ["tokens=3", "tokens=2 bytewise=1"])
def test_a_stream_arrives_byte_for_byte_and_its_text_equals_the_whole_answer(client: httpx.Client, script: str) -> None:
    streamed = client.post(CHAT, json=body(script, stream=True))
    parts = events(streamed.text)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert parts[-1] == "[DONE]"
    joined = "".join(json.loads(part)["choices"][0]["delta"].get("content", "") for part in parts[:-1])
    whole = client.post(CHAT, json=body(script)).json()["choices"][0]["message"]["content"]
    assert joined == whole == TEXT * int(script.split()[0][-1])


def test_usage_comes_only_when_asked_for(client: httpx.Client) -> None:
    without = client.post(CHAT, json=body("tokens=1", stream=True, stream_options={}))
    with_usage = client.post(CHAT, json=body("tokens=1", stream=True, stream_options={"include_usage": True}))
    assert "usage" not in without.text
    assert json.loads(events(with_usage.text)[-2])["usage"]["completion_tokens"] == 1


def test_the_id_is_ours_and_the_clients_is_only_a_label(shared: Running, client: httpx.Client) -> None:
    answers = [
        client.post(CHAT, json=body("tokens=1", rid="same", model="scripted"), headers={"x-request-id": "same"})
        for _ in range(2)
    ]
    minted = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(set(minted)) == 2
    sent = shared.seen()["seen"][-2:]
    assert [payload["rid"] for payload in sent] == minted
    assert [payload["model"] for payload in sent] == [SERVED_NAME] * 2
    assert all("same" not in json.dumps(payload) for payload in sent)
    logged = [line for line in shared.log() if line.get("request_id") in minted]
    assert [line["label"] for line in logged] == ["same", "same"]


def test_every_answer_names_the_policy_and_the_verdict(client: httpx.Client) -> None:
    for answer in (client.post(CHAT, json=body("tokens=1")), client.post(CHAT, json={"messages": []})):
        assert answer.headers["x-trace-policy"] == "scripted@1"
        assert answer.headers["x-trace-policy-digest"].startswith("sha256:")
        assert answer.headers["x-trace-verdict"] == "sha256:verdict"


def test_hints_are_asked_for_as_a_file_and_served_under_the_rollout_id(shared: Running, client: httpx.Client) -> None:
    answer = client.post(CHAT, json=body("tokens=1", trace_hints=True, stream=True))
    rollout = answer.headers["x-trace-rollout"]
    assert shared.seen()["seen"][-1]["custom_params"]["trace_hints"] == "file"
    assert client.get(f"/v1/rollouts/{rollout}/hints").status_code == 404
    (shared.hint_dir / f"{rollout}.safetensors").write_bytes(b"hint bytes")
    assert client.get(f"/v1/rollouts/{rollout}/hints").content == b"hint bytes"
    (shared.hint_dir / f"{rollout}_0-2.safetensors").write_bytes(b"third choice")
    assert client.get(f"/v1/rollouts/{rollout}/hints?choice=2").content == b"third choice"
    for bad in ("-1", "x", "999", ""):
        assert client.get(f"/v1/rollouts/{rollout}/hints?choice={bad}").json()["error"]["param"] == "choice"


def test_hints_that_were_lost_are_gone_and_the_answer_says_why(shared: Running, client: httpx.Client) -> None:
    answer = client.post(CHAT, json=body("tokens=1", trace_hints=True))
    rollout = answer.headers["x-trace-rollout"]
    mark = marks.file_name(rollout, "dropped")
    (shared.hint_dir / mark).write_bytes(marks.content(rollout, "dropped", "queue full: 256 items"))
    gone = client.get(f"/v1/rollouts/{rollout}/hints")
    assert gone.status_code == 410
    assert gone.json()["error"]["code"] == "hints_dropped"
    assert "queue full: 256 items" in gone.json()["error"]["message"]


@pytest.mark.parametrize("name", ["..%2F..%2Fserver.log", "trace-..", "trace-" + "A" * 32, "x", "trace-" + "0" * 31])
def test_a_rollout_id_that_is_not_ours_reads_no_file(client: httpx.Client, name: str) -> None:
    assert client.get(f"/v1/rollouts/{name}/hints").status_code == 404


@pytest.mark.parametrize(
    ("script", "received"), [("tokens=4 error_after=2", 2), ("tokens=4 abort_after=2", 2), ("tokens=4 cut_after=2", 2)]
)
def test_a_failed_stream_ends_with_an_error_event(client: httpx.Client, script: str, received: int) -> None:
    answer = client.post(CHAT, json=body(script, stream=True))
    parts = events(answer.text)
    assert answer.status_code == 200
    assert len(parts) == received + 1
    assert set(json.loads(parts[-1])["error"]) == {"message", "type", "param", "code"}
    assert "abort" not in answer.text.replace("aborted", "")
    assert "[DONE]" not in answer.text
    assert_serves(client)


def test_a_frame_that_is_not_json_ends_the_stream_with_an_error(client: httpx.Client) -> None:
    parts = events(client.post(CHAT, json=body("tokens=3 garbage_after=1", stream=True)).text)
    assert "not JSON" in json.loads(parts[-1])["error"]["message"]


@pytest.mark.parametrize("stop", ["error_after=0", "abort_after=0", "cut_after=0"])
def test_a_failure_before_the_first_token_is_a_status_and_not_a_stream(client: httpx.Client, stop: str) -> None:
    answer = client.post(CHAT, json=body(f"tokens=2 {stop}", stream=True))
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "engine_error"


def test_an_aborted_whole_answer_is_an_error(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=body("tokens=1 abort=1"))
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_not_finite_never_leave(client: httpx.Client, stream: bool) -> None:
    text = client.post(CHAT, json=body("tokens=1 nan=1", stream=stream)).text
    parsed = json.loads(
        events(text)[0] if stream else text, parse_constant=lambda name: pytest.fail(f"{name} was relayed")
    )
    assert parsed["choices"][0]["logprob"] is None


@pytest.mark.parametrize(("status", "expected"), [(400, 400), (500, 502), (401, 502), (503, 503), (429, 503)])
def test_a_refusal_of_the_engine_is_translated(client: httpx.Client, status: int, expected: int) -> None:
    answer = client.post(CHAT, json=body(f"status={status} message=why", stream=True))
    assert answer.status_code == expected
    assert "why" in answer.json()["error"]["message"]
    assert ("retry-after" in answer.headers) == (expected == 503)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["hang=1", "tokens=400 delay=0.05"])
def test_a_client_that_leaves_before_an_answer_frees_the_engine(shared: Running, script: str, stream: bool) -> None:
    before = last_rid(shared)
    with raw_request(shared, body(script, stream=stream)):
        wait_until(lambda: last_rid(shared) != before)
        rid = last_rid(shared)
    wait_until(lambda: shared.seen()["running"] == 0, 2.0)
    wait_until(lambda: rid in shared.seen()["aborted"])


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_the_engine(shared: Running) -> None:
    with raw_request(shared, body("tokens=400 delay=0.05", stream=True)) as connection:
        received = b""
        while b"content" not in received.partition(b"\r\n\r\n")[2]:
            received += connection.recv(65536)
    wait_until(lambda: shared.seen()["running"] == 0, 2.0)
    rid = last_rid(shared)
    wait_until(lambda: any(line.get("request_id") == rid for line in shared.log()))
    assert [line["outcome"] for line in shared.log() if line.get("request_id") == rid] == ["client_gone"]


def test_a_finished_request_is_not_aborted(shared: Running, client: httpx.Client) -> None:
    answers = [
        client.post(CHAT, json=body("tokens=1")),
        client.post(CHAT, json=body("tokens=1", stream=True)),
        client.post(CHAT, json=body("status=400")),
    ]
    time.sleep(0.2)
    assert not {answer.headers["x-request-id"] for answer in answers} & set(shared.seen()["aborted"])


def last_rid(running: Running) -> str | None:
    """The request that reached the engine last."""
    seen = running.seen()["seen"]
    return str(seen[-1]["rid"]) if seen else None


@contextlib.contextmanager
def raw_request(running: Running, payload: dict[str, Any]) -> Iterator[socket.socket]:
    """A request over a bare socket, so that the test decides when the connection goes."""
    host, port = running.url.removeprefix("http://").split(":")
    data = json.dumps(payload).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {running.api_key}\r\n"
        f"content-length: {len(data)}\r\ncontent-type: application/json\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + data)
        yield connection
