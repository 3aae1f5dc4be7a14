from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import redactors

from trace_serve.server.observe.request_log_record import (
    MAX_LINE_BYTES,
    Exchange,
    RecordError,
    TooLargeError,
    assemble,
    conversation_of,
    encode,
)

TEXT = "SECRETplan 안녕"


def exchange(request: dict[str, Any], response: bytes | None = None, **changes: Any) -> Exchange:
    return replace(
        Exchange(
            id="trace-1",
            route="/v1/chat/completions",
            status=200,
            outcome="ok",
            conversation=None,
            at=0.0,
            policy="p@1",
            digest="sha256:d",
            request=json.dumps(request).encode(),
            response=response,
            streamed=False,
        ),
        **changes,
    )


def redacted(each: Exchange) -> dict[str, Any]:
    line = encode(each, "redactors:mask 7", redactors.mask)
    assert b"SECRET" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def sse(*chunks: dict[str, Any], end: str = "\n\n") -> bytes:
    return "".join(f"data: {json.dumps(chunk)}{end}" for chunk in chunks).encode() + f"data: [DONE]{end}".encode()


def test_every_text_of_a_request_is_redacted() -> None:
    request = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": TEXT, "name": "SECRETname"},
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "SECRETarg"}'}}]},
        ],
        "stop": ["SECRETstop"],
        "tools": [{"type": "function", "function": {"name": "f", "description": TEXT}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "SECRETconst"}}},
        "user": "SECRETuser",
        "rid": "SECRETrid",
        "max_tokens": 5,
        "temperature": 0.5,
    }
    line = redacted(exchange(request))
    assert line["redactor"] == "redactors:mask 7"
    assert line["request"]["messages"][0] == {"role": "system", "content": "[gone] 안녕", "name": "[gone]"}
    assert line["request"]["messages"][1]["role"] == "user"
    assert (line["request"]["max_tokens"], line["request"]["temperature"]) == (5, 0.5)
    assert line["request"]["model"] == "policy"
    assert "user" not in line["request"]


def test_token_ids_are_a_text_too() -> None:
    assert redacted(exchange({"prompt": [1, 2, 3]}))["request"]["prompt"] is None
    assert json.loads(encode(exchange({"prompt": [1, 2, 3]}), None, None))["request"]["prompt"] == [1, 2, 3]


def test_an_answer_keeps_texts_and_reasons_and_loses_what_repeats_them_token_by_token() -> None:
    answer = {
        "id": "trace-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "reasoning_content": "SECRETthought"},
                "logprobs": {"content": [{"token": "SECRET", "bytes": [83]}]},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1},
        "metadata": {"weight_version": "SECRETversion"},
    }
    line = redacted(exchange({"messages": []}, json.dumps(answer).encode()))
    (choice,) = line["response"]["choices"]
    message = {"role": "assistant", "content": "[gone] 안녕", "reasoning_content": "[gone]"}
    assert choice == {"index": 0, "finish_reason": "stop", "message": message}
    assert line["response"]["usage"] == {"prompt_tokens": 1}


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_a_stream_adds_up_to_the_answer_that_would_have_come_whole(end: str) -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {"content": "one"}}]},
        {"choices": [{"index": 0, "delta": {"content": "안"}}, {"index": 1, "delta": {"content": "!"}}]},
        {"choices": [{"index": 0, "delta": {"content": "녕"}, "finish_reason": "length"}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 4}},
    ]
    answer = assemble(b": comment" + end.encode() + sse(*chunks, end=end))
    texts = [(each["message"]["content"], each["finish_reason"]) for each in answer["choices"]]
    assert texts == [("안녕", "length"), ("one!", "stop")]
    assert answer["usage"] == {"completion_tokens": 4}


def test_a_stream_of_completions_adds_up_to_a_text() -> None:
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a", "b")]
    assert assemble(sse(*chunks))["choices"] == [{"index": 0, "text": "ab"}]


def test_a_secret_that_a_stream_cuts_in_two_is_redacted_whole() -> None:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("SEC", "RETplan")]
    line = redacted(exchange({"messages": []}, sse(*chunks), streamed=True))
    assert line["response"]["choices"][0]["message"]["content"] == "[gone]"


@pytest.mark.parametrize("outcome", ["client_gone", "answer_cut"])
def test_half_an_answer_is_no_answer(outcome: str) -> None:
    line = json.loads(encode(exchange({"messages": []}, sse(), streamed=True, outcome=outcome), None, None))
    assert (line["response"], line["outcome"]) == (None, outcome)


def test_a_redactor_that_fails_writes_nothing_and_says_nothing_of_the_text() -> None:
    with pytest.raises(RecordError, match=r"the redactor raised ValueError$"):
        encode(exchange({"messages": [{"role": "user", "content": TEXT}]}), "x", redactors.broken)
    with pytest.raises(RecordError, match="returned NoneType, expected a text"):
        encode(exchange({"messages": [{"role": "user", "content": TEXT}]}), "x", lambda _: None)


def test_text_that_is_no_unicode_is_refused_rather_than_written() -> None:
    with pytest.raises(RecordError, match="not JSON"):
        encode(exchange({"prompt": "x"}), "x", lambda _: "\ud800")


def test_a_line_that_the_gate_would_not_read_is_refused() -> None:
    fits = exchange({"prompt": "x" * (MAX_LINE_BYTES - 400)})
    assert len(encode(fits, None, None)) <= MAX_LINE_BYTES
    with pytest.raises(TooLargeError, match="expected at most 1048576"):
        encode(exchange({"prompt": "x" * MAX_LINE_BYTES}), None, None)


def test_the_limit_of_a_line_is_the_gates() -> None:
    from eval_gate.queries import MAX_RECORD_BYTES

    assert MAX_LINE_BYTES == MAX_RECORD_BYTES


def test_a_conversation_is_named_without_being_told() -> None:
    assert conversation_of("anna@example.org") == conversation_of("anna@example.org")
    assert conversation_of("anna@example.org") != conversation_of("bert@example.org")
    assert "anna" not in str(conversation_of("anna@example.org"))
    assert conversation_of(None) is conversation_of("") is None
