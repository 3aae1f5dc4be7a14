"""What one running front-end consists of, and how it opens, drains and closes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import aiohttp
import structlog
from starlette.requests import Request

from trace_serve.errors import EngineError, TraceServeError
from trace_serve.server.admission import Admission
from trace_serve.server.authorization import Authorization
from trace_serve.server.engine_client import EngineClient, EngineView
from trace_serve.server.errors import ApiError, unauthorized, unavailable
from trace_serve.server.flight import Flight
from trace_serve.server.metrics import Metrics
from trace_serve.server.supervisor import EngineLike, Supervisor
from trace_serve.server.tokens import PromptCounter
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.server")


class FrontEnd:
    """State shared by all routes of one application.

    Args:
        settings: limits and time-outs.
        authorization: the policy that may be served, decided before any engine starts.
        factory: makes an unstarted engine process for that policy.
        on_exit: called when the server should end, for example because the engine cannot be kept alive.
    """

    def __init__(
        self,
        settings: Settings,
        authorization: Authorization,
        factory: Callable[[], EngineLike],
        *,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.authorization = authorization
        self.metrics = Metrics()
        self.admission = Admission(
            max_in_flight=settings.max_in_flight,
            max_queue=settings.max_queue,
            max_per_key=settings.max_per_key,
            queue_timeout_s=settings.queue_timeout_s,
        )
        self.counter = PromptCounter(authorization.path)
        self.flights: set[Flight] = set()
        self.failure: TraceServeError | None = None
        self.on_exit = on_exit
        self._draining = False
        self._factory = factory
        self._client: EngineClient | None = None
        self._supervisor: Supervisor | None = None
        self._drain_timer: asyncio.TimerHandle | None = None

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise EngineError("the front-end is not open")
        return self._client

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise EngineError("the front-end is not open")
        return self._supervisor

    async def open(self) -> None:
        """Begins to start the engine; returns at once, so that liveness answers while the model loads."""
        self._client = EngineClient(idle_s=self.settings.upstream_idle_s)
        self._supervisor = Supervisor(
            self._factory,
            self._client,
            self.settings,
            check_report=self.authorization.check_report,
            on_lost=self._engine_lost,
            on_give_up=self._give_up,
        )
        self._supervisor.start()

    async def close(self) -> None:
        """Cuts what still runs and ends the engine."""
        self._cut_all(_stopping())
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._client is not None:
            await self._client.close()
        self.counter.close()

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

    def engine_in_service(self) -> EngineView:
        """The engine that a new request goes to.

        Raises:
            ApiError: 503 with Retry-After while there is none, or the server stops.
        """
        if self._draining:
            raise _stopping()
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

    def authenticate(self, request: Request) -> str:
        """Checks the API key and returns the name under which this client's requests are counted.

        Raises:
            ApiError: 401.
        """
        expected = self.settings.api_key
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if expected is not None:
            given = key.strip().encode() if scheme.lower() == "bearer" else b""
            if not hmac.compare_digest(given, expected.get_secret_value().encode()):
                raise unauthorized()
        if key:
            return hashlib.sha256(key.encode()).hexdigest()[:16]
        return request.client.host if request.client else "unknown"

    def response_headers(self) -> dict[str, str]:
        """Names the policy, and the verdict that let it in, on every answer."""
        headers = {
            "x-trace-policy": self.authorization.label,
            "x-trace-policy-digest": self.authorization.digest,
        }
        if self.authorization.verdict_id is not None:
            headers["x-trace-verdict"] = self.authorization.verdict_id
        return headers

    async def render_metrics(self) -> bytes:
        """Prometheus text; the scheduler's load is asked for at scrape time, with a short limit."""
        metrics, supervisor = self.metrics, self.supervisor
        engine = supervisor.engine
        running, waiting = await self._engine_load(engine)
        metrics.engine_running.set(running)
        metrics.engine_waiting.set(waiting)
        metrics.in_flight.set(self.admission.in_flight)
        metrics.queued.set(self.admission.queued)
        metrics.ready.set(float(engine is not None and supervisor.doubt is None and not self._draining))
        metrics.restarts.set(supervisor.restarts)
        self.authorization.describe(metrics.policy)
        return metrics.render()

    async def report(self) -> dict[str, Any]:
        """The engine's report with the policy and the verdict.

        Raises:
            ApiError: there is no engine, or it does not answer.
        """
        engine = self.engine_in_service()
        try:
            timeout_s = self.settings.heartbeat_timeout_s
            report = await self.client.get_json(engine.url, engine.api_key, "/trace/report", timeout_s=timeout_s)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise unavailable("the engine does not answer", code="not_ready", retry_after_s=5.0) from exc
        return {**report, **self.authorization.summary()}

    async def _engine_load(self, engine: EngineView | None) -> tuple[float, float]:
        unknown = float("nan"), float("nan")
        if engine is None:
            return unknown
        try:
            path = "/v1/loads?include=core"
            answer = await self.client.get_json(engine.url, engine.api_key, path, timeout_s=1.0)
            loads = answer["loads"]
            return (
                float(sum(each["num_running_reqs"] for each in loads)),
                float(sum(each["num_waiting_reqs"] for each in loads)),
            )
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return unknown

    def _engine_lost(self, reason: str) -> None:
        self._cut_all(unavailable(f"the engine was lost: {reason}", code="engine_lost", retry_after_s=5.0))

    def _give_up(self, error: TraceServeError) -> None:
        self.failure = error
        self.on_exit()

    def _cut_all(self, error: ApiError) -> None:
        for flight in list(self.flights):
            flight.cut(error)


def _stopping() -> ApiError:
    return unavailable("the server is stopping; the request was cut", code="stopping", retry_after_s=5.0)
