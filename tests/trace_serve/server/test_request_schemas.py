"""A request is refused with the field's name before the engine sees it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trace_serve.server.errors import ApiError
from trace_serve.server.limits import Limits, check_context, check_limits
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, parse_request

MESSAGES = [{"role": "user", "content": "hi"}]
LIMITS = Limits(context_length=512, vocab_size=300)


def refusal(body: dict[str, Any], model: type[ChatRequest] | type[CompletionRequest] = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_limits(parse_request(model, body), LIMITS)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 9),
        ("n", 2**63 - 1),
        ("n", 1.0),
        ("n", True),
        ("n", "1"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 512),
        ("max_tokens", 100_000_000),
        ("max_tokens", 2**63),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.5),
        ("logit_bias", {"300": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1": 101.0}),
        ("logit_bias", {"1": math.nan}),
        ("logit_bias", {str(index): 1.0 for index in range(301)}),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", ["x" * 257]),
        ("stop", [1]),
        ("stop_token_ids", [300]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [99_999_999]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", list(range(65))),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("messages", []),
        ("messages", [{"role": "robot", "content": "hi"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "hi", "tool_calls": []}]),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", 1_000_000),
        ("logprobs", 5),
        ("user", "x" * 257),
        ("rid", ["a"]),
        ("custom_params", {"trace_hints": "inline"}),
        ("tools", []),
        ("no_such_field", 1),
    ],
)
def test_a_value_outside_its_range_is_refused_under_its_name(field: str, value: object) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, field: value}
    if field == "top_logprobs":
        body["logprobs"] = True
    error = refusal(body)
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 300]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"prompt": [1] * 500}, "max_tokens"),
        ({"prompt": "hi", "logprobs": 21}, "logprobs"),
        ({"prompt": "hi", "logprobs": True}, "logprobs"),
        ({"prompt": "hi", "logprobs": 1, "echo": True}, "echo"),
        ({"prompt": "hi", "min_tokens": 17}, "min_tokens"),
        ({}, "prompt"),
    ],
)
def test_a_completion_request_is_checked_likewise(body: dict[str, Any], field: str) -> None:
    assert refusal(body, CompletionRequest).param == field


def test_top_logprobs_without_logprobs_is_refused() -> None:
    assert refusal({"messages": MESSAGES, "top_logprobs": 2}).param == "top_logprobs"


def test_two_different_token_limits_are_refused() -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "max_completion_tokens": 5}
    assert refusal(body).param == "max_completion_tokens"


def test_the_longest_value_shown_in_an_error_is_short() -> None:
    assert len(refusal({"messages": MESSAGES, "seed": "x" * 100_000}).message) < 300


def test_boundary_values_are_accepted() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "n": 8,
        "max_tokens": 511,
        "min_tokens": 511,
        "seed": -(2**63),
        "temperature": 2,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "logit_bias": {"0": -100, "299": 100},
        "stop": "x",
        "stop_token_ids": [0, 299],
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
        "stream_options": {},
        "frequency_penalty": None,
    }
    request = parse_request(ChatRequest, body)
    check_limits(request, LIMITS)
    assert request.messages[0].content == "a\nb"
    assert request.stop == ["x"]


def test_the_engine_gets_our_id_its_own_model_name_and_no_labels() -> None:
    body = {"messages": MESSAGES, "model": "policy", "rid": "mine", "user": "me", "trace_hints": True, "max_tokens": 3}
    payload = parse_request(ChatRequest, body).upstream_payload(rid="trace-1", served_name="engine-model")
    assert payload == {
        "messages": MESSAGES,
        "max_tokens": 3,
        "model": "engine-model",
        "rid": "trace-1",
        "custom_params": {"trace_hints": "file", "trace_rollout": True},
    }


def test_the_counted_prompt_decides_which_field_is_too_large() -> None:
    request = parse_request(ChatRequest, {"messages": MESSAGES, "max_tokens": 12})
    check_context(request, 500, LIMITS)
    with pytest.raises(ApiError) as caught:
        check_context(request, 501, LIMITS)
    assert caught.value.param == "max_tokens"
    assert "at most 11" in caught.value.message
    with pytest.raises(ApiError) as caught:
        check_context(request, 512, LIMITS)
    assert caught.value.param == "messages"
