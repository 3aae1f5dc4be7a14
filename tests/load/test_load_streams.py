"""Events of an answer are timed as they come; an answer that does not end well is a failure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from trace_serve.load.stream import StreamFailedError, StreamTimes, read_stream

USAGE: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def text(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content, **fields}}], "usage": None}


def read(*events: Any, done: bool = True) -> StreamTimes:
    """Reads events on a clock that advances by one second an event."""
    clock = itertools.count(1.0)
    lines = [event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n" for event in events]

    def body() -> Iterator[bytes]:
        for line in [*lines, *([b"data: [DONE]\n"] if done else [])]:
            yield line
            yield b"\n"

    return read_stream(body(), lambda: next(clock))


def test_first_text_gaps_and_end_are_timed() -> None:
    times = read(text(""), text("a"), text("b"), text(None), text("c"), USAGE)
    assert (times.first, times.gaps, times.end) == (2.0, (1.0, 2.0), 8.0)
    assert (times.prompt_tokens, times.completion_tokens) == (3, 2)


def test_reasoning_tool_calls_and_completions_are_text_too() -> None:
    assert read(text(None, reasoning_content="hm"), USAGE).first == 1.0
    assert read(text(""), text(None, tool_calls=[{"index": 0}]), USAGE).first == 2.0
    assert read({"choices": [{"text": ""}]}, {"choices": [{"text": "x"}]}, USAGE).first == 2.0


def test_an_answer_without_text_is_timed_by_its_first_event() -> None:
    assert read(text(""), USAGE).first == 1.0


def test_comments_and_other_fields_of_the_format_are_no_events() -> None:
    assert read(b": keep-alive\n", b"event: x\n", text("a"), USAGE).first == 1.0


@pytest.mark.parametrize(
    ("events", "done", "reason"),
    [
        ((text("a"), {"error": {"message": "engine lost"}}), True, "error event: engine lost"),
        ((text("a"), {"error": "plain"}), True, "error event: plain"),
        ((text("a"), USAGE), False, r"without \[DONE\]"),
        ((text("a"),), True, "no usage chunk"),
        ((), False, "without"),
        ((b"data: {broken\n", USAGE), True, "not a JSON object"),
        ((b"data: [1]\n", USAGE), True, "not a JSON object"),
        (({"choices": [{"delta": {}, "finish_reason": "abort"}]}, USAGE), True, "aborted"),
        ((text("a"), {"choices": [], "usage": {"prompt_tokens": 1}}), True, "no token counts"),
    ],
)
def test_an_answer_that_does_not_end_well_is_a_failure(events: Any, done: bool, reason: str) -> None:
    with pytest.raises(StreamFailedError, match=reason):
        read(*events, done=done)
