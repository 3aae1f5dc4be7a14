"""Which policy answers a request: the active one, or the candidate that is being tried beside it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from trace_serve.errors import TraceServeError
from trace_serve.server.authorization import Authorization
from trace_serve.server.engines.client import EngineClient
from trace_serve.server.errors import unavailable
from trace_serve.server.policies.shadow import Shadow
from trace_serve.server.service import EngineFactory, Service
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.services")

Trial = Literal["canary", "shadow"]


@dataclass(frozen=True)
class Candidate:
    """A policy that is tried beside the active one.

    Attributes:
        service: its engine.
        trial: `canary` answers a share of the requests; `shadow` gets copies of them and its answers are only stored.
        share: of requests, 0 to 1.
        shadow: what sends and stores the copies of a shadow.
    """

    service: Service
    trial: Trial
    share: float
    shadow: Shadow | None = None

    def takes(self, token: str) -> bool:
        """Whether a request belongs to the candidate's share; the same token always answers the same."""
        return self.share > 0 and _fraction(token) < self.share


class Services:
    """The active policy, and at most one candidate; opens and stops their engines.

    Args:
        factory: makes an engine for a policy.
        client: HTTP to engines.
        settings: limits and time-outs.
        on_fatal: called when the active policy's engine cannot be kept alive.
    """

    def __init__(
        self,
        factory: EngineFactory,
        client: EngineClient,
        settings: Settings,
        *,
        on_fatal: Callable[[TraceServeError], None],
    ) -> None:
        self._factory = factory
        self._client = client
        self._settings = settings
        self._on_fatal = on_fatal
        self._ending: set[asyncio.Task[None]] = set()
        self.active: Service | None = None
        self.candidate: Candidate | None = None
        self.previous: Authorization | None = None
        """What was active before; a rollback returns to it."""
        self.reason = "no policy is active"
        """Why nothing serves while nothing is active."""

    def __iter__(self) -> Iterator[Service]:
        if self.active is not None:
            yield self.active
        if self.candidate is not None:
            yield self.candidate.service

    def start(self, authorization: Authorization) -> Service:
        """A service whose engine is starting, not yet chosen by any request."""
        service = Service(authorization, self._factory, self._client, self._settings, on_give_up=self._given_up)
        service.start()
        return service

    def choose(self, token: str, model: str | None = None) -> Service:
        """The service that answers a request.

        Args:
            token: decides the canary's share; the same token gets the same policy.
            model: the request's `model`; one that only the canary has goes to the canary.

        Raises:
            ApiError: 503, no policy is active.
        """
        active, candidate = self.active, self.candidate
        if active is None:
            raise unavailable(f"not ready: {self.reason}", code="no_policy", retry_after_s=30.0)
        if candidate is not None and candidate.trial == "canary" and candidate.service.ready:
            by_name = model is not None and model not in active.model_names and model in candidate.service.model_names
            if by_name or (model != active.authorization.label and candidate.takes(token)):
                return candidate.service
        return active

    def shadow(self, token: str) -> Shadow | None:
        """What takes a copy of a request, if anything does."""
        candidate = self.candidate
        if candidate is None or candidate.shadow is None or not candidate.service.ready:
            return None
        return candidate.shadow if candidate.takes(token) else None

    def answering(self) -> list[Service]:
        """Services whose answers clients get."""
        found = [] if self.active is None else [self.active]
        if self.candidate is not None and self.candidate.trial == "canary":
            found.append(self.candidate.service)
        return found

    def end_trial(self, candidate: Candidate, *, drain_s: float) -> None:
        """Drops the candidate; its engine ends in the background."""
        self.candidate = None
        if candidate.shadow is not None:
            self._in_background(candidate.shadow.close())
        self.retire(candidate.service, drain_s=drain_s)

    def retire(self, service: Service, *, drain_s: float) -> None:
        """Ends a service in the background once its requests have finished, or at the deadline."""
        self._in_background(self._retire(service, drain_s))

    async def stop(self) -> None:
        for task in list(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self.candidate is not None and self.candidate.shadow is not None:
            await self.candidate.shadow.close()
        await asyncio.gather(*(service.stop() for service in self))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _retire(self, service: Service, drain_s: float) -> None:
        try:
            deadline = asyncio.get_running_loop().time() + drain_s
            while service.flights and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
        finally:
            await service.stop()
        log.info("policy_retired", policy=service.authorization.label)

    def _given_up(self, service: Service, error: TraceServeError) -> None:
        if service is self.active:
            self._on_fatal(error)
        elif self.candidate is not None and service is self.candidate.service:
            log.error("candidate_dropped", policy=service.authorization.label, reason=str(error))
            self.end_trial(self.candidate, drain_s=0.0)


def _fraction(token: str) -> float:
    """A number in [0, 1) that looks random and depends on the token alone."""
    return int.from_bytes(hashlib.sha256(token.encode()).digest()[:7], "big") / 2.0**56
