"""Renders `/metrics`: the front-end's own registry and what its engines say at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import Counter

from trace_serve.server.authorization import Authorization
from trace_serve.server.engines.client import EngineView
from trace_serve.server.engines.remote_pool import RemotePool
from trace_serve.server.observe.engine_metrics import EngineCollector, EngineName, sample
from trace_serve.server.service import Service

if TYPE_CHECKING:
    from trace_serve.server.front_end import FrontEnd


class MetricsPage:
    """Scrapes that come at the same time share one answer, so that they never multiply the load on the engine.

    Args:
        front: the front-end that is described.
        engine_metrics: whether its engines were started with metrics of their own.
    """

    def __init__(self, front: FrontEnd, *, engine_metrics: bool) -> None:
        self._front = front
        self._engine_metrics = engine_metrics
        self._engines = EngineCollector()
        self._metrics = front.metrics
        self._metrics.add(self._engines)
        self._seen: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._current: asyncio.Task[bytes] | None = None
        # Parsing and rendering take tens of milliseconds, which streams on the event loop would feel.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    async def render(self) -> bytes:
        """Prometheus text."""
        if self._current is None or self._current.done():
            self._current = asyncio.get_running_loop().create_task(self._render())
        return await asyncio.shield(self._current)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _render(self) -> bytes:
        front, metrics = self._front, self._metrics
        services = {service.authorization.label: service for service in front.services}
        samples = await asyncio.gather(
            *(
                sample(front.client, EngineName(label, name), engine, metrics=self._engine_metrics)
                for label, service in services.items()
                for name, engine in _engines(service).items()
            )
        )
        self._engines.samples = tuple(samples)
        active = front.services.active
        label = None if active is None else active.authorization.label
        loads = [each.load for each in samples if each.name.policy == label and each.load is not None]
        metrics.engine_running.set(sum(load[0] for load in loads) if loads else float("nan"))
        metrics.engine_waiting.set(sum(load[1] for load in loads) if loads else float("nan"))
        metrics.in_flight.set(front.admission.in_flight)
        metrics.in_flight_limit.set(front.settings.max_in_flight)
        metrics.tokens.set(front.admission.tokens_in_flight)
        metrics.token_limit.set(front.settings.token_budget or float("inf"))
        metrics.tasks.set(len(asyncio.all_tasks()))
        metrics.queued.set(front.admission.queued)
        metrics.queue_limit.set(front.settings.max_queue)
        metrics.ready.set(float(front.accepts))
        self._describe(service.authorization for service in services.values())
        self._count_up(metrics.aborts, front.client, front.client.aborted)
        for service in services.values():
            self._count_up(metrics.restarts, service.supervisor, service.supervisor.restarts)
        return await asyncio.get_running_loop().run_in_executor(self._thread, metrics.render)

    def _describe(self, authorizations: Iterable[Authorization]) -> None:
        metrics = self._metrics
        metrics.policy.clear()
        metrics.verdict_expiry.clear()
        for each in authorizations:
            each.describe(metrics.policy)
            if each.verdict_expires is not None:
                metrics.verdict_expiry.labels(each.label).set(each.verdict_expires.timestamp())

    def _count_up(self, counter: Counter, owner: object, total: int) -> None:
        """Adds what `owner` has counted since the last scrape; a new owner starts at 0."""
        counter.inc(total - self._seen.get(owner, 0))
        self._seen[owner] = total


def _engines(service: Service) -> dict[str, EngineView | None]:
    """The engines of a policy by name; None where one is not in service."""
    supervisor = service.supervisor
    return supervisor.views if isinstance(supervisor, RemotePool) else {"local": supervisor.engine}
