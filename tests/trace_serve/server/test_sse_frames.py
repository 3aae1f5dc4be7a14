"""Frames survive any split of the bytes, and only what must not reach a client is changed."""

from __future__ import annotations

import json

import pytest

from trace_serve.server.relay import sse
from trace_serve.server.relay.sse import FrameBuffer, FrameError, inspect_frames, is_plain


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


STREAM = (
    chunk(choices=[{"delta": {"content": "龜🫠"}, "finish_reason": None}])
    + b": comment\r\n\r\n"
    + chunk(choices=[{"delta": {}, "finish_reason": "stop"}])
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_bytes_come_out_as_they_went_in_however_they_are_split(size: int) -> None:
    buffer = FrameBuffer()
    out = [buffer.feed(STREAM[at : at + size]) for at in range(0, len(STREAM), size)]
    assert b"".join(out) == STREAM
    assert all(part == b"" or part.endswith((b"\n\n", b"\r\n\r\n")) for part in out)


def test_an_unfinished_frame_is_held_back() -> None:
    buffer = FrameBuffer()
    assert buffer.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert buffer.feed(b"\n") == b""
    assert buffer.feed(b"\n") == b"data: 2\n\n"


def test_a_frame_without_an_end_is_refused_before_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_FRAME_BYTES", 100)
    buffer = FrameBuffer()
    buffer.feed(b"x" * 100)
    with pytest.raises(FrameError):
        buffer.feed(b"x")


def test_done_and_usage_are_seen_and_passed_on_untouched() -> None:
    frames = chunk(choices=[], usage={"completion_tokens": 3}) + b"data: [DONE]\n\n"
    seen = inspect_frames(frames)
    assert (seen.relay, seen.usage, seen.done, seen.failure) == (frames, {"completion_tokens": 3}, True, None)


def test_nothing_after_done_is_passed_on() -> None:
    assert inspect_frames(b"data: [DONE]\n\n" + chunk(choices=[])).relay == b"data: [DONE]\n\n"


def test_an_abort_is_a_failure_and_is_not_passed_on() -> None:
    good = chunk(choices=[{"delta": {"content": "x"}, "finish_reason": None}])
    seen = inspect_frames(good + chunk(choices=[{"delta": {}, "finish_reason": "abort"}]) + b"data: [DONE]\n\n")
    assert seen.relay == good
    assert seen.failure is not None
    assert not seen.done


@pytest.mark.parametrize("frame", [chunk(error={"message": "boom"}), chunk(object="error", message="boom")])
def test_an_error_of_the_engine_is_a_failure_with_its_message(frame: bytes) -> None:
    assert inspect_frames(frame).failure == "boom"


def test_words_that_look_like_trouble_in_the_text_change_nothing() -> None:
    frames = chunk(choices=[{"delta": {"content": 'NaN Infinity "abort" error [DONE]'}, "finish_reason": None}])
    seen = inspect_frames(frames)
    assert (seen.relay, seen.done, seen.failure) == (frames, False, None)


def test_numbers_that_are_not_finite_become_null() -> None:
    seen = inspect_frames(b'data: {"choices": [{"logprobs": [NaN, -Infinity, 1.5], "text": "NaN"}]}\n\n')
    parsed = json.loads(seen.relay.removeprefix(b"data: "))
    assert parsed == {"choices": [{"logprobs": [None, None, 1.5], "text": "NaN"}]}


def test_a_suspect_frame_that_is_not_json_is_refused() -> None:
    with pytest.raises(FrameError):
        inspect_frames(b"data: {error\n\n")


def test_usage_and_metadata_that_are_null_are_not_looked_into() -> None:
    plain = b'data: {"choices": [], "usage":null, "metadata": null}\n\n'
    assert is_plain(plain * 3)
    assert not is_plain(plain * 3 + b'data: {"usage":{"completion_tokens":3}}\n\n')
    assert not is_plain(plain + b"data: {error\n\n")


@pytest.mark.parametrize("border", [b"\n\n", b"\r\n\r\n"])
def test_frames_before_the_first_that_matters_stay_as_they_are(border: bytes) -> None:
    plain = b'data: {not json, "usage":null}' + border
    usage = b'data: {"choices": [], "usage":{"completion_tokens":3}}' + border
    seen = inspect_frames(plain * 2 + usage + b"data: [DONE]" + border)
    assert seen.relay == plain * 2 + usage + b"data: [DONE]" + border
    assert (seen.usage, seen.done) == ({"completion_tokens": 3}, True)


def test_the_first_frame_of_a_stream_is_parsed_whatever_it_holds() -> None:
    with pytest.raises(FrameError):
        inspect_frames(b": comment\n\ndata: {broken\n\n" + STREAM, parse_first=True)
    assert inspect_frames(STREAM, parse_first=True).relay == STREAM
