"""Example requests of the OpenAPI document; a test validates each of them."""

from __future__ import annotations

from typing import Any

_QUESTION = [{"role": "user", "content": "Name a river in France."}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_RIVER = {
    "type": "object",
    "properties": {"river": {"type": "string"}, "km": {"type": "integer"}},
    "required": ["river", "km"],
    "additionalProperties": False,
}

CHAT: dict[str, Any] = {
    "plain": {"summary": "A question", "value": {"messages": _QUESTION, "max_tokens": 64}},
    "stream": {
        "summary": "A stream with token counts",
        "value": {"messages": _QUESTION, "stream": True, "stream_options": {"include_usage": True}},
    },
    "rollout": {
        "summary": "A rollout for a trainer: hints, token ids and log-probabilities of four samples",
        "value": {"messages": _QUESTION, "n": 4, "temperature": 1.0, "max_tokens": 512, "trace_hints": True},
    },
    "pinned": {
        "summary": "Only with these weights",
        "value": {"messages": _QUESTION, "weight_version": "step-12", "return_rollout": True},
    },
    "json": {
        "summary": "JSON that follows a schema",
        "value": {
            "messages": _QUESTION,
            "response_format": {"type": "json_schema", "json_schema": {"name": "river", "schema": _RIVER}},
        },
    },
    "tools": {
        "summary": "A tool that must be called",
        "value": {
            "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
            "tools": [_WEATHER],
            "tool_choice": "required",
        },
    },
    "tool_answer": {
        "summary": "The answer of a tool",
        "value": {
            "messages": [
                {"role": "user", "content": "How is the weather in Paris?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, rain"},
            ],
            "tools": [_WEATHER],
            "tool_choice": "none",
        },
    },
}
CHAT_STREAM = (
    'data: {"id": "trace-...", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": '
    '{"content": "The "}}]}\n\n'
    'data: {"id": "trace-...", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, '
    '"finish_reason": "stop"}]}\n\n'
    "data: [DONE]\n\n"
)
COMPLETION: dict[str, Any] = {
    "text": {"summary": "A text", "value": {"prompt": "The Seine flows through", "max_tokens": 8}},
    "tokens": {
        "summary": "Token ids, and everything a trainer needs of the answer",
        "value": {"prompt": [1, 17, 42], "max_tokens": 128, "return_rollout": True, "logprobs": 0},
    },
}
TOKENIZE: dict[str, Any] = {
    "text": {"summary": "A text", "value": {"prompt": "The Seine"}},
    "chat": {"summary": "A conversation, rendered as for an answer", "value": {"messages": _QUESTION}},
}
