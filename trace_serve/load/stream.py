"""Reads one answer's server-sent events and times them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class StreamFailedError(Exception):
    """The answer did not end as a successful stream ends."""


@dataclass
class StreamTimes:
    """When what came, on the clock that was given.

    Attributes:
        first: first text (content, reasoning or tool call); the first event when there was no text.
        gaps: between successive events with text.
        end: the last byte.
    """

    first: float
    gaps: tuple[float, ...]
    end: float
    prompt_tokens: int
    completion_tokens: int


def read_stream(lines: Iterator[bytes], clock: Callable[[], float]) -> StreamTimes:
    """Reads to the end.

    Args:
        lines: lines of the body as they come.
        clock: seconds; asked once an event.

    Raises:
        StreamFailedError: an error event, a finish by abort, or no usage or no [DONE].
    """
    texts: list[float] = []
    first_event: float | None = None
    usage: dict[str, Any] | None = None
    done = False
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        now = clock()
        first_event = now if first_event is None else first_event
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = _parse(data)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if choice.get("finish_reason") == "abort":
                raise StreamFailedError("the answer was aborted")
        if any(map(_has_text, event.get("choices") or ())):
            texts.append(now)
    if not done:
        raise StreamFailedError("the stream ended without [DONE]")
    if usage is None or first_event is None:
        raise StreamFailedError("the stream had no usage chunk")
    gaps = tuple(later - earlier for earlier, later in pairwise(texts))
    first = texts[0] if texts else first_event
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(type(count) is int for count in counts):
        raise StreamFailedError(f"the usage chunk has no token counts: {usage}"[:200])
    return StreamTimes(first, gaps, clock(), usage["prompt_tokens"], usage["completion_tokens"])


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
        error = event.get("error")
    except (ValueError, AttributeError) as exc:
        raise StreamFailedError(f"an event is not a JSON object: {data[:80]!r}") from exc
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise StreamFailedError(f"error event: {str(message)[:200]}")
    return dict(event)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
