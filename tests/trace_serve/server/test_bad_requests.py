"""A bad request is a 400 that names its field, before any stream header, and the next request works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Running

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "tokens=1"}]}


def assert_refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        ({"stop_token_ids": [99_999_999], "min_tokens": 1}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 2**63 - 1}, "n"),
        ({"max_tokens": 100_000_000}, "max_tokens"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_field_is_named_and_the_next_request_works(
    client: httpx.Client, shared: Running, fields: dict[str, Any], param: str, stream: bool
) -> None:
    seen = len(shared.seen()["seen"])
    for _ in range(3):
        assert_refused(client.post(CHAT, json={**GOOD, **fields, "stream": stream}), param=param)
    assert len(shared.seen()["seen"]) == seen
    assert client.post(CHAT, json=GOOD).status_code == 200


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("content", [r'"\ud800"', r'"\udc00a"', '"a" NaN', "NaN", "1e999", '"\udcff"'])
def test_bytes_that_are_not_strict_json_are_refused(client: httpx.Client, content: str, stream: str) -> None:
    raw = f'{{"messages":[{{"role":"user","content":{content}}}],"max_tokens":4,"stream":{stream}}}'
    answer = client.post(CHAT, content=raw.encode("utf-8", "surrogateescape"))
    assert assert_refused(answer)["code"] == "invalid_json"


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"null", b"{", b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(client: httpx.Client, raw: bytes) -> None:
    assert_refused(client.post(CHAT, content=raw))


def test_prompt_and_completion_over_the_context_are_refused_exactly(client: httpx.Client, shared: Running) -> None:
    content = "tokens=1 " + "x" * 91
    prompt_tokens = len(f"<user>{content}\n<assistant>")
    fits = {"messages": [{"role": "user", "content": content}], "max_tokens": 512 - prompt_tokens}
    assert client.post(CHAT, json=fits).status_code == 200
    seen = len(shared.seen()["seen"])
    error = assert_refused(client.post(CHAT, json={**fits, "max_tokens": 513 - prompt_tokens}), param="max_tokens")
    assert f"at most {512 - prompt_tokens}" in error["message"]
    long = {"messages": [{"role": "user", "content": "x" * 600}]}
    assert_refused(client.post(CHAT, json=long), param="messages")
    assert len(shared.seen()["seen"]) == seen


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_with_413(client: httpx.Client, declared: bool) -> None:
    data = b"x" * (5 << 20)
    answer = client.post(CHAT, content=data if declared else iter([data]))
    assert assert_refused(answer, 413)["code"] == "body_too_large"


def test_a_model_that_is_not_served_is_refused(client: httpx.Client) -> None:
    assert assert_refused(client.post(CHAT, json={**GOOD, "model": "gpt"}), 404, "model")["code"] == "model_not_found"


def test_embeddings_and_unknown_routes_are_refused_clearly(client: httpx.Client) -> None:
    assert assert_refused(client.post("/v1/embeddings", json={}), 404)["code"] == "unsupported_endpoint"
    assert assert_refused(client.get("/nowhere"), 404)["code"] == "unknown_route"
    assert assert_refused(client.get(CHAT), 405)["code"] == "unknown_route"


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a-client-key"}])
@pytest.mark.parametrize("path", ["/v1/models", "/trace/report", "/v1/rollouts/trace-0/hints"])
def test_without_the_key_nothing_is_shown(shared: Running, header: dict[str, str], path: str) -> None:
    assert_refused(httpx.get(shared.url + path, headers=header), 401)
    assert_refused(httpx.post(shared.url + CHAT, json=GOOD, headers=header), 401)


def test_health_and_metrics_need_no_key(shared: Running) -> None:
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert httpx.get(shared.url + path).status_code == 200


def test_the_published_schema_states_the_ranges(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert '"maximum": 20' in json.dumps(body["properties"]["top_logprobs"])


def test_many_refusals_keep_memory_flat(client: httpx.Client, shared: Running) -> None:
    def resident_kib() -> int:
        status = Path(f"/proc/{shared.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    bad = {"messages": [{"role": "user", "content": "x" * 20_000}], "n": 0, "stream": True}
    for _ in range(300):
        client.post(CHAT, json=bad)
    before = resident_kib()
    for _ in range(1500):
        client.post(CHAT, json=bad)
    assert resident_kib() - before < 8 * 1024
