"""What one running front-end consists of, and how it opens, drains and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog
from starlette.requests import Request

from trace_serve.errors import EngineError, TraceServeError
from trace_serve.server.admission.admission import Admission
from trace_serve.server.admission.rate_limits import RateLimits
from trace_serve.server.authorization import Authorization
from trace_serve.server.engines.client import EngineClient
from trace_serve.server.errors import ApiError, unavailable
from trace_serve.server.keys.access import Access, Caller
from trace_serve.server.keys.key import Scope
from trace_serve.server.observe.metrics import Metrics
from trace_serve.server.observe.metrics_page import MetricsPage
from trace_serve.server.observe.observation import Observers
from trace_serve.server.relay.flight import Flight
from trace_serve.server.rollouts.store import RolloutStore
from trace_serve.server.service import EngineFactory, Service
from trace_serve.server.services import Services
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.server")


class Part(Protocol):
    """Something that lives as long as the front-end."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class FrontEnd:
    """State shared by all routes of one application.

    Args:
        settings: limits and time-outs.
        authorization: the policy that is active from the start, decided before any engine starts; None waits for the
            admin API to activate one.
        factory: makes an unstarted engine process for a policy.
        on_exit: called when the server should end, for example because the engine cannot be kept alive.
    """

    def __init__(
        self,
        settings: Settings,
        authorization: Authorization | None,
        factory: EngineFactory,
        *,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.metrics_page = MetricsPage(self, engine_metrics=settings.engine_metrics)
        self.observers = Observers(settings, self.metrics)
        self.admission = Admission(
            max_in_flight=settings.max_in_flight,
            max_queue=settings.max_queue,
            max_per_key=settings.max_per_key,
            queue_timeout_s=settings.queue_timeout_s,
            max_tokens=settings.token_budget,
        )
        self.access = Access(settings.api_key, settings.key_file)
        self.rate_limits = RateLimits(settings.requests_per_minute, settings.tokens_per_minute)
        self.rollouts = RolloutStore(
            max_count=settings.rollout_max_count, max_bytes=settings.rollout_max_bytes, ttl_s=settings.rollout_ttl_s
        )
        self.flights: set[Flight] = set()
        self.failure: TraceServeError | None = None
        self.on_exit = on_exit
        self._draining = False
        self._parts: list[Part] = []
        self._first = authorization
        self._factory = factory
        self._client: EngineClient | None = None
        self._services: Services | None = None
        self._drain_timer: asyncio.TimerHandle | None = None

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise EngineError("the front-end is not open")
        return self._client

    @property
    def services(self) -> Services:
        if self._services is None:
            raise EngineError("the front-end is not open")
        return self._services

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def accepts(self) -> bool:
        """Whether a request that comes now is taken, as readiness says it."""
        active = None if self._services is None else self._services.active
        return active is not None and active.ready and not self._draining

    def attach(self, part: Part) -> None:
        """Has something opened after this front-end and closed before it."""
        self._parts.append(part)

    async def open(self) -> None:
        """Begins to start the engine; returns at once, so that liveness answers while the model loads."""
        self._client = EngineClient(idle_s=self.settings.upstream_idle_s)
        self._services = Services(self._factory, self._client, self.settings, on_fatal=self._give_up)
        if self._first is not None:
            self._services.active = self._services.start(self._first)
        for part in self._parts:
            await part.open()

    async def close(self) -> None:
        """Cuts what still runs and ends the engines."""
        self._cut_all(_stopping())
        for part in reversed(self._parts):
            await part.close()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        if self._services is not None:
            await self._services.stop()
        if self._client is not None:
            await self._client.close()
        self.metrics_page.close()
        await asyncio.to_thread(self.observers.close)

    def begin_drain(self, *, now: bool = False) -> None:
        """Accepts nothing more; what runs may finish until the deadline, then it is cut with an error.

        Args:
            now: cut at once.
        """
        first = not self._draining
        self._draining = True
        self.admission.refuse_waiting(_stopping())
        if now:
            self._cut_all(_stopping())
        elif first:
            log.info("draining", running=len(self.flights), deadline_s=self.settings.drain_s)
            loop = asyncio.get_running_loop()
            self._drain_timer = loop.call_later(self.settings.drain_s, self._cut_all, _stopping())

    def choose(self, token: str, model: str | None = None) -> Service:
        """The service that answers a request; see `Services.choose`.

        Raises:
            ApiError: 503 with Retry-After while no policy is active, or the server stops.
        """
        if self._draining:
            raise _stopping()
        return self.services.choose(token, model)

    @property
    def active(self) -> Service:
        """The active policy's service.

        Raises:
            ApiError: 503 with Retry-After while there is none, or the server stops.
        """
        service = self.choose("")
        return self.services.active or service

    def authenticate(self, request: Request, scope: Scope | None = None) -> Caller:
        """Checks the API key and returns the client that the request counts for.

        Raises:
            ApiError: 401, or 403 when the key lacks the scope.
        """
        host = request.client.host if request.client else None
        return self.access.check(request.headers.get("authorization"), host, scope)

    def response_headers(self) -> dict[str, str]:
        """What an answer says that no engine had a part in: the active policy, if there is one."""
        active = None if self._services is None else self._services.active
        return {} if active is None else dict(active.headers())

    def _give_up(self, error: TraceServeError) -> None:
        self.failure = error
        self.on_exit()

    def _cut_all(self, error: ApiError) -> None:
        for flight in list(self.flights):
            flight.cut(error)


def _stopping() -> ApiError:
    return unavailable("the server is stopping; the request was cut", code="stopping", retry_after_s=5.0)
