"""OpenAI routes say which tokens and weights an answer is made of, alike in a stream, a whole answer and its hints."""

from __future__ import annotations

import base64
import json
import urllib.request
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from engine_client import events

from trace_serve.engine.launch import EngineProcess
from trace_serve.engine.rollout_records import VERSION_HEADER
from trace_serve.hints import wire
from trace_serve.policy import Policy

pytestmark = pytest.mark.engine


def request(engine: EngineProcess, route: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": engine.served_name, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if "chat" in route else {"prompt": "hello"}
    return body | {"custom_params": {"trace_rollout": True}} | fields


def records(engine: EngineProcess, route: str, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records of an answer, and the metadata that they came with."""
    body = request(engine, route, **fields)
    if body.get("stream"):
        found = [chunk["metadata"] for chunk in events(engine, route, body) if chunk.get("metadata")]
        assert len(found) == 1
        return found[0]["trace_rollout"], found[0]
    metadata = engine.request(route, body)["metadata"]
    return metadata["trace_rollout"], metadata


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_records_the_same_tokens_as_the_whole_answer_and_as_its_hints(
    fp4_engine: EngineProcess, route: str
) -> None:
    records(fp4_engine, route)  # both runs below then find the same prefix in the cache
    (whole,), _ = records(fp4_engine, route)
    asked = {"trace_rollout": True, "trace_hints": "inline"}
    (streamed,), metadata = records(fp4_engine, route, stream=True, custom_params=asked)
    hints = wire.from_bytes(base64.b64decode(metadata["trace_hints"][0]["data"]))
    prompt = streamed["prompt_token_ids"]
    assert [*prompt, *streamed["output_token_ids"]] == [*hints.token_ids.tolist(), hints.next_token_id]
    assert hints.logprobs is not None
    np.testing.assert_allclose(streamed["output_logprobs"], hints.logprobs[len(prompt) - 1 :], atol=1e-6)
    for field in ("prompt_token_ids", "output_token_ids", "finish_reason"):
        assert streamed[field] == whole[field]
    np.testing.assert_allclose(streamed["output_logprobs"], whole["output_logprobs"], atol=1e-5)
    assert whole["weight_version_spans"]["sampled"] == [[0, 5, metadata["weight_version"]]]
    assert whole["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_a_record_of_its_own(fp4_engine: EngineProcess, stream: bool) -> None:
    found, _ = records(fp4_engine, "/v1/completions", n=2, temperature=1.0, stream=stream)
    assert [len(record["output_token_ids"]) for record in found] == [5, 5]
    assert [len(record["output_logprobs"]) for record in found] == [5, 5]
    assert found[0]["prompt_token_ids"] == found[1]["prompt_token_ids"]


def test_an_answer_without_the_wish_says_nothing_of_tokens(fp4_engine: EngineProcess) -> None:
    answer = fp4_engine.request("/v1/completions", request(fp4_engine, "/v1/completions", custom_params=None))
    assert "trace_rollout" not in answer["metadata"]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_an_update_without_a_label_shows_in_streams_and_whole_answers(
    fp4_engine: EngineProcess, fp4_policy: Policy, route: str
) -> None:
    done = fp4_engine.request("/update_weights_from_disk", {"model_path": str(fp4_policy.path)}, timeout_s=120)
    assert done["success"], done
    label = fp4_engine.request("/trace/report")["weights"]["label"]
    assert "+" in label
    assert fp4_engine.request(route, request(fp4_engine, route))["metadata"]["weight_version"] == label
    a_stream_names_the_weights_of_its_first_token(fp4_engine, route)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_names_the_weights_of_its_first_token(fp4_engine: EngineProcess, route: str) -> None:
    a_stream_names_the_weights_of_its_first_token(fp4_engine, route)


def a_stream_names_the_weights_of_its_first_token(fp4_engine: EngineProcess, route: str) -> None:
    data = json.dumps(request(fp4_engine, route, stream=True)).encode()
    headers = {"Authorization": f"Bearer {fp4_engine.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(fp4_engine.url + route, data=data, headers=headers), timeout=60
    ) as answer:
        assert unquote(answer.headers[VERSION_HEADER]) == fp4_engine.request("/trace/report")["weights"]["label"]
        answer.read()
