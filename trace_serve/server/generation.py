"""The two routes that sample tokens, from the request's bytes to the relayed answer."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trace_serve.server.admission.cost import estimate_prompt, surely_fits, token_cost
from trace_serve.server.admission.rate_limits import Reservation
from trace_serve.server.bodies import parse_json, read_body
from trace_serve.server.engines.weight_versions import answering, check_loaded, name_answer, name_stream
from trace_serve.server.errors import ApiError, bad_request
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.keys.access import Caller
from trace_serve.server.limits import check_context, check_limits
from trace_serve.server.model_names import check_model
from trace_serve.server.relay.flight import ClientGoneError, Flight, mint_request_id
from trace_serve.server.relay.relay import StreamResponse, fetch_answer, open_stream
from trace_serve.server.rollouts.record import Recording
from trace_serve.server.schemas.parsing import GenerationRequest, parse_request
from trace_serve.server.service import Service
from trace_serve.server.tool_calls import check_tools

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
        caller = front.authenticate(request, "generate")
        body = await read_body(request, front.settings.max_body_bytes, front.settings.body_timeout_s)
        wanted = parse_request(self._schema, parse_json(body))
        record.observed.asked(body, wanted)
        service = front.choose(wanted.user or rid, wanted.model)
        if wanted.trace_hints and not service.authorization.hints:
            raise bad_request("trace_hints: this server keeps no hints; start it with --hint-dir", param="trace_hints")
        engine = service.engine_in_service()
        check_limits(wanted, engine.limits)
        check_model(wanted.model, front.services.answering())
        await check_tools(wanted, service, front.settings)
        cost = self._cost(wanted, estimate_prompt(wanted), engine.limits.context_length)
        reservation = front.rate_limits.reserve(caller, cost)
        headers.update(reservation.headers())

        flight = Flight(rid, engine, front.client, request.receive)
        record.settles(reservation, flight)
        front.flights.add(flight)
        handed_over = False
        try:
            service = await flight.run(self._admit(flight, caller, wanted, cost))
            headers.update(service.headers())
            record.observed.served_by(service.authorization)
            flight.trace_headers = record.observed.upstream_headers()
            if wanted.records_rollout:
                headers["x-trace-rollout"] = rid
                hints = bool(wanted.trace_hints)
                record.recording = Recording(front.rollouts, rid, caller.name, service, route=self._path, hints=hints)
            await flight.run(check_loaded(front.client, flight.engine, wanted))
            payload = wanted.upstream_payload(rid=rid, served_name=flight.engine.served_name)
            shadow = front.services.shadow(wanted.user or rid)
            if shadow is not None:
                record.observed.copied(body, shadow.copy(self._path, payload))
            if not wanted.stream:
                whole = partial(fetch_answer, flight, front.client, self._path, payload)
                content, answer = await flight.run(answering(front.client, flight.engine, wanted, whole))
                name_answer(headers, wanted, answer)
                record.observed.answered(content, answer)
                record.finish(200, "ok", answer.get("usage"))
                return Response(content, headers=headers, media_type="application/json")
            begun = partial(open_stream, flight, front.client, self._path, payload)
            opening = await flight.run(answering(front.client, flight.engine, wanted, begun))
            name_stream(headers, wanted, opening.upstream.headers)
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

    async def _admit(self, flight: Flight, caller: Caller, wanted: GenerationRequest, cost: int) -> Service:
        """Takes a place in an engine, then counts the prompt, so that floods are turned away before any work.

        The service is chosen here, after the wait: policies may have changed meanwhile.
        """
        concurrent = caller.limits.concurrent
        flight.ticket = await self._front.admission.acquire(caller.name, cost, concurrent=concurrent)
        self._front.metrics.queue_wait.observe(time.monotonic() - flight.started_at)
        service = self._front.choose(wanted.user or flight.rid, wanted.model)
        engine = await service.enter(flight)
        if surely_fits(wanted, engine.limits.context_length):
            return service
        tokens = await service.counter.count(wanted)
        if tokens is not None:
            check_context(wanted, tokens, engine.limits)
            flight.ticket.recount(self._cost(wanted, tokens, engine.limits.context_length))
        return service

    def _cost(self, wanted: GenerationRequest, prompt_tokens: int, context_length: int) -> int:
        default = self._front.settings.default_completion_tokens
        return token_cost(wanted, prompt_tokens, context_length=context_length, default_completion=default)


class _Record:
    """What has to be done when a request ends, whatever becomes of it."""

    def __init__(self, front: FrontEnd, route: str, rid: str, headers: Headers, began: float) -> None:
        self.observed = front.observers.request(rid, route, headers, began)
        self._reservation: Reservation | None = None
        self._flight: Flight | None = None
        self.recording: Recording | None = None

    def settles(self, reservation: Reservation, flight: Flight) -> None:
        """Charges the key's limits when the request ends."""
        self._reservation, self._flight = reservation, flight

    def finish(self, status: int, outcome: str, usage: dict[str, Any] | None) -> None:
        if self._reservation is not None and self._flight is not None:
            sampled = self._flight.sent and status in (200, CLIENT_GONE_STATUS)
            self._reservation.settle(usage, sent=sampled)
        if self.recording is not None and self._flight is not None:
            self.recording.end(outcome, self._flight.metadata)
        self.observed.end(status, outcome, usage)
