"""Server-sent events as bytes: cuts a stream at frame borders and looks into the few frames that matter.

A frame is passed on byte for byte unless it may not be: an error, an answer that was aborted, or JSON with NaN.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

MAX_FRAME_BYTES = 64 << 20
DONE = b"[DONE]"
_MARKS = (b"error", b"abort", b"NaN", b"Infinity", DONE)
_KEYS = (b'"usage"', b'"metadata"')
"""Suspect unless null, which SGLang writes into every chunk."""


class FrameError(Exception):
    """The upstream stream is not server-sent events with JSON data."""


class FrameBuffer:
    """Collects bytes, however they were split into reads, and gives back whole frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Returns every byte up to the last complete frame border, and keeps the rest.

        Raises:
            FrameError: one frame is larger than MAX_FRAME_BYTES.
        """
        if not self._pending and chunk.endswith(b"\n\n"):
            return chunk
        searched = max(0, len(self._pending) - 3)
        self._pending += chunk
        end = max(_last_border(self._pending, b"\n\n", searched), _last_border(self._pending, b"\r\n\r\n", searched))
        if end == 0:
            if len(self._pending) > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of more than {MAX_FRAME_BYTES} bytes")
            return b""
        frames = bytes(self._pending[:end])
        del self._pending[:end]
        return frames


@dataclass(frozen=True)
class Inspected:
    """Attributes:
    relay: bytes to pass on, in order.
    usage: token counts, if a frame carried them.
    metadata: what the engine said beside its tokens, if a frame carried that.
    done: the stream ended as it should.
    failure: the engine said that the answer failed; nothing after it counts.
    """

    relay: bytes
    usage: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    done: bool = False
    failure: str | None = None


def is_plain(frames: bytes) -> bool:
    """Whether a byte scan finds nothing in a run of whole frames that has to be looked into."""
    for mark in _MARKS:
        if mark in frames:
            return False
    return not any(_stands(frames, key) for key in _KEYS)


def inspect_frames(frames: bytes, *, parse_first: bool = False) -> Inspected:
    """Looks into a run of whole frames. Parses JSON only where a byte scan finds something that may matter.

    Args:
        frames: whole frames, borders included.
        parse_first: parse the first frame that carries data in any case, as for the start of a stream.

    Raises:
        FrameError: a frame that was looked into is not JSON.
    """
    if not parse_first and is_plain(frames):
        return Inspected(frames)
    relay = bytearray()
    usage: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    at = 0 if parse_first else _skip_plain(frames, 0, relay)
    while at < len(frames):
        frame = frames[at : _frame_end(frames, at)]
        at += len(frame)
        data = frame_data(frame)
        if data is None or not (parse_first or not is_plain(data)):
            relay += frame
            continue
        if data == DONE:
            relay += frame
            return Inspected(bytes(relay), usage=usage, metadata=metadata, done=True)
        answer, changed = parse_finite(data)
        failure = failure_of(answer)
        if failure is not None:
            return Inspected(bytes(relay), usage=usage, metadata=metadata, failure=failure)
        if isinstance(answer, dict) and isinstance(answer.get("usage"), dict):
            usage = answer["usage"]
        if isinstance(answer, dict) and isinstance(answer.get("metadata"), dict):
            metadata = answer["metadata"]
        relay += b"data: " + orjson.dumps(answer) + b"\n\n" if changed else frame
        if parse_first:
            parse_first = False
            at = _skip_plain(frames, at, relay)
    return Inspected(bytes(relay), usage=usage, metadata=metadata)


def frame_data(frame: bytes) -> bytes | None:
    """The data of one frame, or None for a comment or an empty frame."""
    lines = [line[5:].removeprefix(b" ") for line in frame.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def parse_finite(data: bytes) -> tuple[Any, bool]:
    """Parses JSON and puts null where a number is not finite; the flag says whether that happened.

    Raises:
        FrameError: not JSON.
    """
    try:
        return orjson.loads(data), False
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data, parse_constant=lambda _: None), True
    except ValueError as exc:
        raise FrameError(f"not JSON: {exc}") from exc


def failure_of(answer: Any) -> str | None:
    """Why an answer of the engine, whole or one chunk, is not a success; None when nothing is wrong with it."""
    if not isinstance(answer, dict):
        return f"expected a JSON object, got {type(answer).__name__}"
    error = answer.get("error")
    if error:
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    if answer.get("object") == "error":
        return str(answer.get("message", "unknown error"))
    for choice in answer.get("choices") or ():
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            return "the engine aborted the request"
    return None


def _last_border(data: bytes | bytearray, mark: bytes, start: int, stop: int | None = None) -> int:
    at = data.rfind(mark, start, stop)
    return 0 if at < 0 else at + len(mark)


def _stands(data: bytes, key: bytes, start: int = 0, stop: int | None = None) -> bool:
    """Whether a JSON key stands in `data[start:stop]` with a value other than null."""
    found = data.count(key, start, stop)
    nulls = data.count(key + b":null", start, stop) + data.count(key + b": null", start, stop) if found else 0
    return found != nulls


def _skip_plain(frames: bytes, start: int, relay: bytearray) -> int:
    """Passes on the frames from `start` in which a byte scan finds nothing, unsplit; returns where they end."""
    first = min((at for mark in _MARKS if (at := frames.find(mark, start)) >= 0), default=len(frames))
    for key in _KEYS:
        if _stands(frames, key, start, first):
            first = frames.find(key, start, first)
    borders = (_last_border(frames, mark, start, first) for mark in (b"\n\n", b"\r\n\r\n"))
    end = max(start, *borders)
    relay += frames[start:end]
    return end


def _frame_end(frames: bytes, start: int) -> int:
    at = frames.find(b"\n\n", start)
    end = len(frames) if at < 0 else at + 2
    at = frames.find(b"\r\n\r\n", start, end)
    return end if at < 0 else at + 4
