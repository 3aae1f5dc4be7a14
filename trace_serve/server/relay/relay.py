"""Relays the engine's answer to the client: bytes untouched, failures never disguised as success."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trace_serve.server.engines.client import EngineClient
from trace_serve.server.errors import ApiError, bad_request, engine_failed, engine_silent, unavailable
from trace_serve.server.relay.flight import ClientGoneError, Flight
from trace_serve.server.relay.sse import (
    FrameBuffer,
    FrameError,
    Inspected,
    failure_of,
    inspect_frames,
    is_plain,
    parse_finite,
)

ERROR_EVENT_S = 2.0
"""How long a client has to take the error event of a stream that was cut."""

Finished = Callable[[str, dict[str, Any] | None], None]
"""Called once when an answer has ended: the outcome (`ok`, `client_gone` or an error code) and the usage, if known."""


async def fetch_answer(flight: Flight, client: EngineClient, path: str, payload: dict[str, Any]) -> tuple[bytes, Any]:
    """A whole answer: its bytes as the engine sent them (strict JSON guaranteed) and the parsed object.

    Raises:
        ApiError: the engine refused, failed, aborted the request or sent nonsense.
    """
    upstream = await _open(flight, client, path, payload)
    try:
        body = await upstream.read()
        answer, changed = parse_finite(body)
    except TimeoutError as exc:
        raise engine_silent(client.idle_s) from exc
    except aiohttp.ClientError as exc:
        raise engine_failed("the engine broke off its answer", code="answer_cut") from exc
    except FrameError as exc:
        raise engine_failed(f"the engine sent an answer that is {exc}") from exc
    flight.complete = True
    failure = failure_of(answer)
    if failure is not None:
        raise engine_failed(failure, code="generation_failed")
    flight.metadata = answer.get("metadata")
    return (orjson.dumps(answer) if changed else body), answer


@dataclass(frozen=True)
class StreamOpening:
    """A stream whose first frames have arrived and are no error, so that a 200 may be sent."""

    upstream: aiohttp.ClientResponse
    buffer: FrameBuffer
    first: Inspected
    idle_s: float


async def open_stream(flight: Flight, client: EngineClient, path: str, payload: dict[str, Any]) -> StreamOpening:
    """Sends the request and waits for the first whole frame.

    Raises:
        ApiError: the engine refused or failed before its first token; no header has been sent to the client yet.
    """
    upstream = await _open(flight, client, path, payload)
    buffer = FrameBuffer()
    frames = b""
    while not frames:
        frames = buffer.feed(await _read(upstream, client.idle_s))
    try:
        first = inspect_frames(frames, parse_first=True)
    except FrameError as exc:
        raise engine_failed(f"the engine sent a first frame that is {exc}") from exc
    if first.failure is not None and not first.relay:
        raise engine_failed(first.failure, code="generation_failed")
    return StreamOpening(upstream, buffer, first, client.idle_s)


class StreamResponse(Response):
    """Writes an opened stream to the client and owns the flight until the end.

    An ASGI response of its own rather than a body iterator, because an iterator may be dropped without being closed.

    Args:
        flight: closed here, whatever happens.
        opening: the stream.
        headers: sent with the 200.
        stall_s: a client that takes no byte for this long counts as gone.
        finished: told the outcome.
    """

    media_type = "text/event-stream"

    def __init__(
        self, flight: Flight, opening: StreamOpening, headers: dict[str, str], *, stall_s: float, finished: Finished
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._flight = flight
        self._opening = opening
        self._stall_s = stall_s
        self._finished = finished
        self._usage: dict[str, Any] | None = None
        self._header_sent = False
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "client_gone"
        self._watch_for_stall()
        try:
            outcome = await self._answer(send)
        except ClientGoneError:
            pass
        finally:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            self._flight.close()
            self._finished(outcome, self._usage)

    async def _answer(self, send: Send) -> str:
        try:
            await self._flight.run(self._pump_in_task(send))
        except ApiError as error:
            try:
                async with asyncio.timeout(min(self._stall_s, ERROR_EVENT_S)):
                    await self._write(send, error.event(), last=True)
            except TimeoutError as exc:
                raise ClientGoneError from exc
            return error.code or "error"
        return "ok"

    async def _pump_in_task(self, send: Send) -> None:
        """A coroutine that is resumed walks through all its callers, thirty with middleware; a task has none."""
        await asyncio.create_task(self._pump(send))

    async def _pump(self, send: Send) -> None:
        await self._pass_on(send, self._opening.first)
        content, feed, clock = self._opening.upstream.content, self._opening.buffer.feed, self._loop.time
        try:
            while not self._flight.complete:
                chunk = await content.readany()
                if not chunk:
                    raise engine_failed("the engine ended its answer without [DONE]", code="answer_cut")
                frames = feed(chunk)
                if not frames:
                    continue
                if is_plain(frames):
                    self._writing_since = clock()
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                    self._writing_since = None
                else:
                    await self._pass_on(send, inspect_frames(frames))
        except FrameError as exc:
            raise engine_failed(f"the engine sent a frame that is {exc}") from exc
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise _read_failed(exc, self._opening.idle_s) from exc
        except OSError as exc:
            raise ClientGoneError from exc

    async def _pass_on(self, send: Send, seen: Inspected) -> None:
        if seen.usage is not None:
            self._usage = seen.usage
        if seen.metadata is not None:
            self._flight.metadata = seen.metadata
        self._flight.complete = seen.done
        if seen.relay:
            await self._write(send, seen.relay, last=seen.done)
        if seen.failure is not None:
            raise engine_failed(seen.failure, code="generation_failed")

    async def _write(self, send: Send, body: bytes, *, last: bool = False) -> None:
        self._writing_since = self._loop.time()
        try:
            if not self._header_sent:
                self._header_sent = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": not last})
        except OSError as exc:
            raise ClientGoneError from exc
        self._writing_since = None

    def _watch_for_stall(self) -> None:
        """One timer for a whole stream: a time-out for each write would cost more than the write."""
        now = self._loop.time()
        since = now if self._writing_since is None else self._writing_since
        if now - since >= self._stall_s:
            self._flight.client_stalled()
        else:
            self._stall_timer = self._loop.call_at(since + self._stall_s, self._watch_for_stall)


async def _open(flight: Flight, client: EngineClient, path: str, payload: dict[str, Any]) -> aiohttp.ClientResponse:
    try:
        upstream = await _send(flight, client, path, payload)
    except TimeoutError as exc:
        raise engine_silent(client.idle_s) from exc
    except aiohttp.ClientError as exc:
        raise engine_failed("the engine cannot be reached", code="engine_unreachable") from exc
    flight.upstream = upstream
    if upstream.status != 200:
        raise await _refusal(flight, upstream, payload)
    return upstream


async def _send(flight: Flight, client: EngineClient, path: str, payload: dict[str, Any]) -> aiohttp.ClientResponse:
    """Sends to the flight's engine, or to another one while none takes the connection."""
    while True:
        flight.sent = True
        try:
            return await client.post(flight.engine, path, payload, flight.trace_headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            flight.sent = False
            other = flight.reroute(flight.engine)
            if other is None:
                raise
            flight.engine = other
            payload["model"] = other.served_name


async def _read(upstream: aiohttp.ClientResponse, idle_s: float) -> bytes:
    try:
        chunk = await upstream.content.readany()
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise _read_failed(exc, idle_s) from exc
    if not chunk:
        raise engine_failed("the engine ended its answer without [DONE]", code="answer_cut")
    return chunk


def _read_failed(error: Exception, idle_s: float) -> ApiError:
    if isinstance(error, TimeoutError):
        return engine_silent(idle_s)
    return engine_failed("the engine broke off its answer", code="answer_cut")


async def _refusal(flight: Flight, upstream: aiohttp.ClientResponse, payload: dict[str, Any]) -> ApiError:
    """What the engine's status other than 200 means for the client."""
    try:
        text = (await upstream.content.read(65536)).decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError):
        text = ""
    flight.complete = True  # an answered refusal leaves nothing to abort
    message = text
    with contextlib.suppress(orjson.JSONDecodeError):
        message = failure_of(orjson.loads(text)) or text
    message = " ".join(message.split())[:500] or f"status {upstream.status}"
    if upstream.status in (400, 422):
        return bad_request(message, param=_field_at_fault(message, payload))
    if "rammar" in message and "response_format" in payload:
        # SGLang calls a schema that no text can satisfy an error of its own.
        return bad_request(f"response_format: {message}", param="response_format")
    if upstream.status in (429, 503):
        return unavailable(f"the engine is busy: {message}", code="engine_busy", retry_after_s=1.0)
    return engine_failed(f"the engine answered {upstream.status}: {message}")


def _field_at_fault(message: str, payload: dict[str, Any]) -> str | None:
    """The field that an engine's refusal is about; SGLang itself names none."""
    prompt = "messages" if "messages" in payload else "prompt"
    for words, field in (
        ("Requested token count", "max_tokens"),
        ("longer than the model's context length", prompt),
        ("grammar", "response_format"),
        ("Tool ", "tools"),
        ("trace_hints", "trace_hints"),
    ):
        if words in message and (field in payload or field in ("max_tokens", "trace_hints")):
            return field
    return None
