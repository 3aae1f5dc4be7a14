"""Failures that other servers have had, asked of the front-end over the real engine on the CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(front_end: Any) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {front_end.api_key}"} if front_end.api_key else {}
    with httpx.Client(base_url=front_end.url, headers=headers, timeout=120) as client:
        yield client


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert answer.status_code == 200, answer.text
    assert parts[-1] == "[DONE]"
    return [strict(part) for part in parts[:-1]]


def joined(parts: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])


def seconds_until(check: Callable[[], bool], limit: float) -> float:
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < limit, f"not within {limit} s"
        time.sleep(0.1)
    return time.monotonic() - began


def engine_running(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("trace_serve_engine_running_requests "))
    return float(line.split()[1])


def assert_serves(client: httpx.Client) -> None:
    assert client.post(CHAT, json={"messages": HI, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "times"),
    [
        ({"logprobs": True, "top_logprobs": 1_000_000, "max_tokens": 4}, "top_logprobs", 1),
        ({"stop_token_ids": [99_999_999], "min_tokens": 1, "max_tokens": 4}, "stop_token_ids", 1),
        ({"n": 0}, "n", 1),
        ({"n": 2**63 - 1}, "n", 1),
        ({"max_tokens": 100_000_000}, "max_tokens", 10),
    ],
    ids=["top-logprobs-huge", "stop-token-out-of-vocab", "n-zero", "n-int64-max", "over-context"],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_is(
    client: httpx.Client, fields: dict[str, Any], param: str, times: int, stream: bool
) -> None:
    for _ in range(times):
        answer = client.post(CHAT, json={"messages": HI, "stream": stream, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["param"] == param
    assert_serves(client)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_lone_surrogate_is_refused_before_any_header(client: httpx.Client, stream: str) -> None:
    raw = rf'{{"messages":[{{"role":"user","content":"\ud800"}}],"max_tokens":4,"stream":{stream}}}'
    answer = client.post(CHAT, content=raw)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_the_context_is_filled_to_the_last_token_and_not_over(client: httpx.Client) -> None:
    context = client.get("/health/ready").json()["context_length"]
    used = client.post(CHAT, json={"messages": HI, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    over = client.post(CHAT, json={"messages": HI, "max_tokens": context - used + 1})
    assert over.json()["error"]["param"] == "max_tokens"
    assert f"at most {context - used}" in over.json()["error"]["message"]
    stop_at_once = {"stop_token_ids": [int(t) for t in range(64)], "logit_bias": {"40": 100}}
    fits = client.post(CHAT, json={"messages": HI, "max_tokens": context - used, **stop_at_once})
    assert fits.status_code == 200, fits.text


def test_characters_split_over_tokens_arrive_whole(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "repeat: 안녕 🫠🥹龜"}],
        "temperature": 0,
        "max_tokens": 32,
        "seed": 1,
    }
    whole = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    streamed = joined(chunks(client.post(CHAT, json={**body, "stream": True})))
    assert streamed == whole


def test_characters_of_several_tokens_are_never_cut(client: httpx.Client) -> None:
    """The policy's tokens are bytes, and the schema leaves it no choice of them."""
    text = "안녕 🫠🥹龜"
    schema = {"name": "x", "schema": {"enum": [text]}}
    body = {"messages": HI, "max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": schema}}
    whole = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    streamed = joined(chunks(client.post(CHAT, json={**body, "stream": True})))
    assert json.loads(whole) == json.loads(streamed) == text
    assert "\ufffd" not in whole + streamed


def test_usage_comes_only_when_asked_for(client: httpx.Client) -> None:
    body = {"messages": HI, "stream": True, "max_tokens": 4, "ignore_eos": True}
    without = chunks(client.post(CHAT, json={**body, "stream_options": {}}))
    with_usage = chunks(client.post(CHAT, json={**body, "stream_options": {"include_usage": True}}))
    assert not any(part.get("usage") for part in without)
    assert with_usage[-1]["usage"]["completion_tokens"] == 4


def test_two_requests_with_one_client_id_both_succeed(client: httpx.Client) -> None:
    headers = {
        "x-request-id": "same",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }

    def ask(_: int) -> httpx.Response:
        return client.post(CHAT, json={"messages": HI, "rid": "same", "max_tokens": 8}, headers=headers)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_strict_json(client: httpx.Client, stream: bool) -> None:
    body = {
        "prompt": "hi",
        "temperature": 0.01,
        "top_p": 0.3,
        "logprobs": 5,
        "max_tokens": 64,
        "ignore_eos": True,
        "stream": stream,
    }
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert chunks(answer)
    else:
        strict(answer.text)


def test_log_probabilities_of_the_stream_equal_those_of_the_whole_answer(client: httpx.Client) -> None:
    body = {"messages": HI, "temperature": 0, "logprobs": True, "top_logprobs": 5, "max_tokens": 16}
    client.post(CHAT, json=body)  # both runs below then find the same prefix in the cache
    whole = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    parts = chunks(client.post(CHAT, json={**body, "stream": True}))
    streamed = [
        token
        for part in parts
        for choice in part["choices"]
        for token in (choice.get("logprobs") or {}).get("content") or ()
    ]
    assert [token["token"] for token in streamed] == [token["token"] for token in whole]
    assert [token["logprob"] for token in streamed] == pytest.approx([token["logprob"] for token in whole], abs=1e-5)
    assert [[top["token"] for top in token["top_logprobs"]] for token in streamed] == [
        [top["token"] for top in token["top_logprobs"]] for token in whole
    ]


@pytest.mark.parametrize("moment", ["before the first token", "after the first token"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(client: httpx.Client, front_end: Any, moment: str, stream: bool) -> None:
    seconds_until(lambda: engine_running(client) == 0, 10)
    host, port = front_end.url.removeprefix("http://").split(":")
    context = client.get("/health/ready").json()["context_length"]
    body = {"messages": HI, "stream": stream, "max_tokens": context // 2, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {front_end.api_key}\r\n"
        f"content-length: {len(data)}\r\ncontent-type: application/json\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        if moment == "after the first token":
            if stream:
                received = b""
                while b"data: " not in received:
                    received += connection.recv(65536)
            else:
                seconds_until(lambda: engine_running(client) == 1, 20)
    # The scheduler publishes its load about once a second, so the freed place may show a moment later.
    time.sleep(0.3)
    assert seconds_until(lambda: engine_running(client) == 0, 4) < 4
    assert_serves(client)


def test_hints_are_returned_under_the_rollout_id(client: httpx.Client) -> None:
    for stream in (False, True):
        body = {"messages": HI, "max_tokens": 4, "ignore_eos": True, "trace_hints": True, "stream": stream}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        hints = client.get(f"/v1/rollouts/{answer.headers['x-trace-rollout']}/hints")
        assert hints.status_code == 200, hints.text
        size = int.from_bytes(hints.content[:8], "little")
        metadata = json.loads(hints.content[8 : 8 + size])["__metadata__"]
        assert metadata


def test_every_choice_has_hints_of_its_own(client: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 4, "ignore_eos": True, "trace_hints": True, "n": 2, "temperature": 1}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    rollout = answer.headers["x-trace-rollout"]
    files = [client.get(f"/v1/rollouts/{rollout}/hints?choice={i}") for i in range(2)]
    assert [file.status_code for file in files] == [200, 200]
    assert client.get(f"/v1/rollouts/{rollout}/hints").status_code == 404
    assert client.get(f"/v1/rollouts/{rollout}/hints?choice=2").status_code == 404


def test_the_report_names_the_policy(client: httpx.Client) -> None:
    report = client.get("/trace/report").json()
    assert report["policy"]["digest"] == report["policy_digest"]
    assert report["mode"] == "fp4"
    answer = client.post(CHAT, json={"messages": HI, "max_tokens": 1})
    assert answer.headers["x-trace-policy-digest"] == report["policy"]["digest"]


def test_a_frozen_scheduler_stops_readiness_and_a_dead_one_is_replaced(client: httpx.Client, front_end: Any) -> None:
    """Last in this file: it costs a restart of the engine."""
    context = client.get("/health/ready").json()["context_length"]
    body = {"messages": HI, "stream": True, "max_tokens": context // 2, "ignore_eos": True}
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(client.post(CHAT, json=body))) for _ in range(3)]
    with httpx.Client(base_url=front_end.url, timeout=10) as probe:
        for thread in threads:
            thread.start()
        seconds_until(lambda: engine_running(client) == 3, 20)
        scheduler = front_end.scheduler_pid()
        os.kill(scheduler, signal.SIGSTOP)
        try:
            # Every probe is answered at once, however long the scheduler has been silent.
            assert seconds_until(lambda: probe.get("/health/ready").status_code == 503, 15) < 15
            assert probe.get("/health/live").elapsed.total_seconds() < 5
            assert "sign of life" in probe.get("/health/ready").json()["error"]["message"]
        finally:
            os.kill(scheduler, signal.SIGCONT)
        seconds_until(lambda: probe.get("/health/ready").status_code == 200, 20)

        os.kill(scheduler, signal.SIGKILL)
        assert seconds_until(lambda: probe.get("/health/ready").status_code == 503, 10) < 10
        for thread in threads:
            thread.join(30)
        assert len(answers) == 3
        for answer in answers:
            last = answer.text.strip().rsplit("\n\n", 1)[-1]
            assert "error" in json.loads(last.removeprefix("data: "))
            assert '"abort"' not in answer.text
            assert "[DONE]" not in answer.text
        seconds_until(lambda: probe.get("/health/ready").status_code == 200, 240)
    assert_serves(client)
