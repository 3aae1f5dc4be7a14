"""Extensions, tools and formats of the API over the real engine on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from trace_serve.hints import wire

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
FLAG = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.fixture
def client(front_end: Any) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {front_end.api_key}"}
    with httpx.Client(base_url=front_end.url, headers=headers, timeout=120) as client:
        yield client


def tokens_of(client: httpx.Client, **prompt: Any) -> list[int]:
    answer = client.post("/tokenize", json=prompt)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["tokens"]
    return tokens


@pytest.fixture
def no_spaces(client: httpx.Client) -> dict[str, float]:
    """Keeps a random policy from filling its answer with the white space that JSON allows anywhere."""
    return {str(token): -100.0 for token in tokens_of(client, prompt=" \n\t\r")}


def test_tokenize_tells_the_tokens_that_the_answer_is_computed_from(client: httpx.Client) -> None:
    prompt = tokens_of(client, messages=HI)
    chat = client.post(CHAT, json={"messages": HI, "max_tokens": 1, "return_token_ids": True}).json()
    assert chat["choices"][0]["prompt_token_ids"] == prompt
    text = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "return_token_ids": True}).json()
    assert text["choices"][0]["prompt_token_ids"] == tokens_of(client, prompt="hi")


@pytest.mark.parametrize("stream", [False, True])
def test_a_rollout_is_the_same_in_its_record_and_in_its_hints(client: httpx.Client, stream: bool) -> None:
    body = {"messages": HI, "max_tokens": 6, "ignore_eos": True, "trace_hints": {"layers": [1]}, "stream": stream}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-trace-weight-version"] == "default"
    rollout = f"/v1/rollouts/{answer.headers['x-trace-rollout']}"
    hints = wire.from_bytes(client.get(f"{rollout}/hints").content)
    (choice,) = client.get(rollout).json()["choices"]
    assert [*choice["prompt_token_ids"], *choice["output_token_ids"]] == [
        *hints.token_ids.tolist(),
        hints.next_token_id,
    ]
    assert hints.logprobs is not None
    first = len(choice["prompt_token_ids"]) - 1
    assert choice["output_logprobs"] == pytest.approx(hints.logprobs[first:].tolist(), abs=1e-6)
    assert {site.layers for site in hints.sites} == {(1,)}
    assert choice["hints"]["status"] == "ready"
    assert client.delete(f"{rollout}/hints").status_code == 204
    assert client.get(rollout).json()["choices"][0]["hints"] == {"status": "absent"}


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_weights_that_are_loaded_answer_a_request_that_names_some(client: httpx.Client, stream: bool) -> None:
    body = {"messages": HI, "max_tokens": 2, "stream": stream}
    assert client.post(CHAT, json={**body, "weight_version": "default"}).status_code == 200
    refused = client.post(CHAT, json={**body, "weight_version": "step-1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "weight_version")


def test_an_answer_follows_the_schema_that_it_was_asked_for(client: httpx.Client, no_spaces: dict[str, float]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG}}
    body = {"messages": HI, "max_tokens": 40, "response_format": form, "logit_bias": no_spaces}
    answer = client.post(CHAT, json=body).json()["choices"][0]
    assert isinstance(json.loads(answer["message"]["content"])["ok"], bool)
    assert answer["finish_reason"] == "stop"
    for schema in ({"type": "nonsense"}, {"pattern": "(?<=a)b"}, {"$ref": "#/$defs/missing"}):
        broken = {**form, "json_schema": {"name": "x", "schema": {"type": "string", **schema}}}
        refused = client.post(CHAT, json={**body, "response_format": broken})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format"), refused.text
    assert client.post(CHAT, json={"messages": HI, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_is_called_with_arguments_that_follow_its_schema(
    client: httpx.Client, no_spaces: dict[str, float], stream: bool
) -> None:
    tool = {"type": "function", "function": {"name": "flag", "parameters": FLAG, "strict": True}}
    body = {"messages": HI, "max_tokens": 120, "tools": [tool], "tool_choice": "required", "stream": stream}
    answer = client.post(CHAT, json={**body, "parallel_tool_calls": False, "logit_bias": no_spaces})
    assert answer.status_code == 200, answer.text
    if stream:
        parts = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")]
        calls = [
            call
            for part in parts
            for choice in part["choices"]
            for call in choice["delta"].get("tool_calls") or ()
            if call["index"] == 0
        ]
        name = "".join(call["function"].get("name") or "" for call in calls)
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    else:
        function = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
        name, arguments = function["name"], function["arguments"]
    assert name == "flag"
    assert isinstance(json.loads(arguments)["ok"], bool)


def test_the_answer_of_a_tool_goes_back_to_the_policy(client: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "flag", "arguments": '{"ok": true}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    done = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    answer = client.post(CHAT, json={"messages": [*messages, done], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens_of(client, messages=[*messages, done]))


def test_a_tool_whose_schema_is_none_is_refused_by_name(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    refused = client.post(CHAT, json={"messages": HI, "max_tokens": 2, "tools": [tool], "tool_choice": "required"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
