"""The two routes that sample tokens, from the request's bytes to the relayed answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trace_serve.server.errors import ApiError, bad_request, not_found, too_large
from trace_serve.server.flight import ClientGoneError, Flight, mint_request_id
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.limits import check_context, check_limits
from trace_serve.server.relay import StreamResponse, fetch_answer, open_stream
from trace_serve.server.schemas import GenerationRequest, parse_request
from trace_serve.server.service import Service

CLIENT_GONE_STATUS = 499
"""For logs and metrics only: nobody is left to receive it."""


class GenerationRoute:
    """Validates, admits and relays the requests of one OpenAI route.

    Args:
        front: the shared state.
        path: the route, the same at the engine.
        schema: the request model.
    """

    def __init__(self, front: FrontEnd, path: str, schema: type[GenerationRequest]) -> None:
        self._front = front
        self._path = path
        self._schema = schema

    async def __call__(self, request: Request) -> Response:
        rid = mint_request_id()
        began = time.monotonic()
        headers = {"x-request-id": rid, **self._front.response_headers()}
        record = _Record(self._front, self._path, rid, request.headers, began)
        try:
            return await self._answer(request, rid, headers, record)
        except ApiError as error:
            record.finish(error.status, error.code or "invalid_request", None)
            headers.pop("x-trace-rollout", None)
            return error.response(headers)
        except (ClientGoneError, ClientDisconnect):
            record.finish(CLIENT_GONE_STATUS, "client_gone", None)
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception:
            record.finish(500, "internal_error", None)
            raise

    async def _answer(self, request: Request, rid: str, headers: dict[str, str], record: _Record) -> Response:
        front = self._front
        key = front.authenticate(request)
        body = await _read_body(request, front.settings.max_body_bytes, front.settings.body_timeout_s)
        wanted = parse_request(self._schema, _parse_json(body))
        record.observed.asked(body, wanted)
        service = front.choose(wanted.user or rid, wanted.model)
        if wanted.trace_hints and not service.authorization.hints:
            raise bad_request("trace_hints: this server keeps no hints; start it with --hint-dir", param="trace_hints")
        engine = service.engine_in_service()
        check_limits(wanted, engine.limits)
        self._check_model(wanted)

        flight = Flight(rid, engine, front.client, request.receive)
        front.flights.add(flight)
        handed_over = False
        try:
            service = await flight.run(self._admit(flight, key, wanted))
            headers.update(service.headers())
            record.observed.served_by(service.authorization)
            flight.trace_headers = record.observed.upstream_headers()
            if wanted.trace_hints:
                headers["x-trace-rollout"] = rid
            payload = wanted.upstream_payload(rid=rid, served_name=flight.engine.served_name)
            if not wanted.stream:
                content, answer = await flight.run(fetch_answer(flight, front.client, self._path, payload))
                record.observed.answered(content, answer)
                record.finish(200, "ok", answer.get("usage"))
                return Response(content, headers=headers, media_type="application/json")
            opening = await flight.run(open_stream(flight, front.client, self._path, payload))
            record.observed.first_frame()

            def finished(outcome: str, usage: dict[str, Any] | None) -> None:
                front.flights.discard(flight)
                record.finish(200, outcome, usage)

            handed_over = True
            stall_s = front.settings.client_stall_s
            stream = StreamResponse(flight, opening, headers, stall_s=stall_s, finished=finished)
            return record.observed.watched(stream)
        finally:
            if not handed_over:
                flight.close()
                front.flights.discard(flight)

    async def _admit(self, flight: Flight, key: str, wanted: GenerationRequest) -> Service:
        """Takes a place in an engine, then counts the prompt, so that floods are turned away before any work.

        The service is chosen here, after the wait: policies may have changed meanwhile.
        """
        flight.ticket = await self._front.admission.acquire(key)
        self._front.metrics.queue_wait.observe(time.monotonic() - flight.started_at)
        service = self._front.choose(wanted.user or flight.rid, wanted.model)
        engine = await service.enter(flight)
        tokens = await service.counter.count(wanted)
        if tokens is not None:
            check_context(wanted, tokens, engine.limits)
        return service

    def _check_model(self, wanted: GenerationRequest) -> None:
        answering = self._front.services.answering()
        known = {name for service in answering for name in service.model_names}
        if wanted.model is not None and wanted.model not in known:
            names = " or ".join(repr(service.authorization.name) for service in answering)
            raise not_found(
                f"model: got {wanted.model!r}, expected {names}, the policy in service",
                param="model",
                code="model_not_found",
            )


class _Record:
    """What has to be done when a request ends, whatever becomes of it."""

    def __init__(self, front: FrontEnd, route: str, rid: str, headers: Headers, began: float) -> None:
        self.observed = front.observers.request(rid, route, headers, began)

    def finish(self, status: int, outcome: str, usage: dict[str, Any] | None) -> None:
        self.observed.end(status, outcome, usage)


async def _read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive in {timeout_s:g} s",
            kind="invalid_request_error",
            code="body_timeout",
        ) from None
    return bytes(body)


def _parse_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise bad_request(f"body: not strict JSON in UTF-8: {exc}", code="invalid_json") from None
