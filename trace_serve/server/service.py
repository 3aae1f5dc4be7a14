"""One policy in service: what authorised it, the engine that runs it, and the requests inside that engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import structlog

from trace_serve.errors import EngineError, TraceServeError
from trace_serve.server.authorization import Authorization
from trace_serve.server.engines.client import EngineClient, EngineView
from trace_serve.server.engines.remote import remote_addresses
from trace_serve.server.engines.remote_pool import RemotePool
from trace_serve.server.engines.supervisor import EngineLike, Supervisor
from trace_serve.server.engines.weight_versions import header_value
from trace_serve.server.errors import ApiError, unavailable
from trace_serve.server.relay.flight import Flight
from trace_serve.server.tokens import PromptCounter
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.service")

EngineFactory = Callable[[Authorization], EngineLike]
"""Makes an unstarted engine for a policy."""

UPDATE_ROUTE = "/update_weights_from_disk"


class Service:
    """One policy and its one engine. Lives inside the event loop.

    Args:
        authorization: the policy that may be served.
        factory: makes an engine for it; after a `refit`, for the policy of that refit.
        client: HTTP to engines.
        settings: limits and time-outs.
        on_give_up: called once when the engine cannot be kept alive.
    """

    def __init__(
        self,
        authorization: Authorization,
        factory: EngineFactory,
        client: EngineClient,
        settings: Settings,
        *,
        on_give_up: Callable[[Service, TraceServeError], None],
    ) -> None:
        self.authorization = authorization
        self.counter = PromptCounter(authorization.path)
        self.flights: set[Flight] = set()
        self._client = client
        self._settings = settings
        self._held = False
        self._changed = asyncio.Condition()
        self._headers: dict[str, str] | None = None
        self.supervisor: Supervisor | RemotePool
        if settings.engine_urls:
            self.supervisor = RemotePool(
                remote_addresses(settings),
                client,
                settings,
                authorization,
                on_lost=self._remote_engine_lost,
                on_give_up=lambda error: on_give_up(self, error),
            )
        else:
            self.supervisor = Supervisor(
                lambda: factory(self.authorization),
                client,
                settings,
                check_report=lambda report: self.authorization.check_report(report),
                on_lost=self._engine_lost,
                on_give_up=lambda error: on_give_up(self, error),
            )

    def start(self) -> None:
        """Begins to start the engine; returns at once."""
        self.supervisor.start()

    async def stop(self) -> None:
        """Cuts what still runs and ends the engine."""
        self.cut(
            unavailable(
                f"{self.authorization.label} was taken out of service", code="policy_stopped", retry_after_s=1.0
            )
        )
        await self.supervisor.stop()
        self.counter.close()

    @property
    def ready(self) -> bool:
        return self.supervisor.engine is not None and self.supervisor.doubt is None and not self._held

    def engine_in_service(self) -> EngineView:
        """The engine that a new request goes to.

        Raises:
            ApiError: 503 with Retry-After while there is none.
        """
        engine = self.supervisor.engine
        if engine is None:
            raise unavailable(f"not ready: {self.supervisor.reason}", code="not_ready", retry_after_s=5.0)
        return engine

    def engine_without_doubt(self) -> EngineView:
        """As `engine_in_service`, and the scheduler has shown life in the last seconds; this is readiness.

        A busy scheduler may be silent during a long prefill: it is sent no new traffic, but what comes is taken.
        """
        engine = self.engine_in_service()
        if self.supervisor.doubt is not None:
            raise unavailable(f"not ready: {self.supervisor.doubt}", code="not_ready", retry_after_s=5.0)
        return engine

    async def enter(self, flight: Flight) -> EngineView:
        """Lets a request in; while weights are exchanged it waits, and then gets the new ones.

        Raises:
            ApiError: 503, there is no engine any more.
        """
        while self._held:
            async with self._changed:
                await self._changed.wait()
        flight.engine = self.engine_in_service()
        flight.reroute = self.supervisor.alternative
        flight.inside(self.flights)
        return flight.engine

    def cut(self, error: ApiError) -> None:
        """Ends every request inside the engine with an error."""
        for flight in list(self.flights):
            flight.cut(error)

    def headers(self) -> dict[str, str]:
        """Names the policy, its weights and the verdict that let it in, on every answer."""
        if self._headers is None:
            headers = {
                "x-trace-policy": self.authorization.label,
                "x-trace-policy-digest": self.authorization.digest,
            }
            if self.authorization.verdict_id is not None:
                headers["x-trace-verdict"] = self.authorization.verdict_id
            if self._settings.engine_unverified:
                headers["x-trace-engine"] = "unverified"
            self._headers = headers
        headers = dict(self._headers)
        version = header_value(self.supervisor.weight_version)
        if version is not None:
            headers["x-trace-weight-version"] = version
        if not self.as_authorized:
            headers.pop("x-trace-policy-digest")
            headers.pop("x-trace-verdict", None)
        return headers

    @property
    def as_authorized(self) -> bool:
        """Whether the weights are the policy's own, not some that a trainer sent since; true where nothing is said."""
        return self.supervisor.digest in (None, self.authorization.digest)

    @property
    def model_names(self) -> set[str]:
        """What a request may call this policy."""
        names = {self.authorization.name, self.authorization.label}
        engine = self.supervisor.engine
        return names if engine is None else names | {engine.served_name}

    async def report(self) -> dict[str, Any]:
        """The engine's report as it is now, with the policy and the verdict.

        Raises:
            ApiError: there is no engine, or it does not answer.
        """
        engine = self.engine_in_service()
        if self._settings.engine_unverified and engine.report.get("unverified") is True:
            return {**engine.report, **self.authorization.summary()}
        timeout_s = self._settings.heartbeat_timeout_s
        try:
            report = await self._client.get_json(engine.url, engine.api_key, "/trace/report", timeout_s=timeout_s)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise unavailable("the engine does not answer", code="not_ready", retry_after_s=5.0) from exc
        return {**report, **self.authorization.summary()}

    async def wait_ready(self, timeout_s: float) -> None:
        """Blocks until the engine serves.

        Raises:
            EngineError: it does not within `timeout_s`, or cannot be started.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.supervisor.engine is None:
                    if self.supervisor.failure is not None:
                        raise self.supervisor.failure
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise EngineError(
                f"the engine of {self.authorization.label} was not ready in {timeout_s:g} s: {self.supervisor.reason}"
            ) from None

    async def refit(self, authorization: Authorization, *, drain_s: float) -> None:
        """Exchanges the weights of the running engine for another policy's; new requests wait meanwhile.

        Args:
            authorization: a policy of the same recipe, architecture, tokenizer and chat template.
            drain_s: how long requests inside the engine may finish before they are cut with an error.

        Raises:
            ApiError: 503, there is no engine.
            EngineError: the update was refused; the old policy goes on serving, from a fresh engine if need be.
        """
        engine = self.engine_in_service()
        self._held = True
        try:
            await self._drain(drain_s)
            body = {"model_path": str(authorization.path), "weight_version": authorization.label}
            fault = await self._update(engine, body)
            previous = self.authorization
            if fault is None:
                self._serve(authorization)
            fault = fault or await self._unproven()
            if fault is not None:
                self._serve(previous)
                await self._return_to_previous()
                raise EngineError(f"{authorization.label} was not loaded: {fault}")
        finally:
            self._held = False
            async with self._changed:
                self._changed.notify_all()

    async def _update(self, engine: EngineView, body: dict[str, str]) -> str | None:
        """Why the engine did not take the weights; None when it did."""
        try:
            answer = await self._client.post_json(
                engine, UPDATE_ROUTE, body, timeout_s=self._settings.engine_start_timeout_s
            )
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            return f"the engine did not answer ({exc or type(exc).__name__})"
        return None if answer.get("success") is True else str(answer.get("message", "refused without a reason"))

    async def _unproven(self) -> str | None:
        """Why the engine does not prove to serve `authorization`; None when its report does."""
        try:
            await self.supervisor.refresh()
        except TraceServeError as exc:
            return str(exc)
        return None

    async def _return_to_previous(self) -> None:
        """A refused update leaves the old weights; whatever else happened is answered with a fresh engine."""
        fault = await self._unproven()
        if fault is not None:
            log.error("engine_replaced", policy=self.authorization.label, reason=fault)
            self.supervisor.replace(f"a failed weight update left the engine unproven: {fault}")

    def _serve(self, authorization: Authorization) -> None:
        if authorization is not self.authorization:
            self.counter.close()
            self.counter = PromptCounter(authorization.path)
        self.authorization = authorization
        self._headers = None

    async def _drain(self, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while self.flights and loop.time() < deadline:
            await asyncio.sleep(0.02)
        if self.flights:
            log.warning("requests_cut", policy=self.authorization.label, running=len(self.flights))
            self.cut(
                unavailable("another policy takes over; the request was cut", code="policy_switched", retry_after_s=1.0)
            )
            while self.flights:
                await asyncio.sleep(0.02)

    def _remote_engine_lost(self, url: str, reason: str) -> None:
        error = unavailable(f"the engine was lost: {reason}", code="engine_lost", retry_after_s=1.0)
        for flight in list(self.flights):
            if flight.engine.url == url:
                flight.cut(error)

    def _engine_lost(self, reason: str) -> None:
        self.cut(unavailable(f"the engine was lost: {reason}", code="engine_lost", retry_after_s=5.0))
