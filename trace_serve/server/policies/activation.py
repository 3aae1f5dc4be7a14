"""What an operator does with policies while the server runs: one operation at a time, each of them audited."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog

from trace_serve.errors import ConfigError
from trace_serve.server.authorization import Authorization
from trace_serve.server.errors import ApiError
from trace_serve.server.policies.audit import AuditLog
from trace_serve.server.policies.registry import Registry
from trace_serve.server.policies.shadow import Shadow
from trace_serve.server.service import Service
from trace_serve.server.services import Candidate, Services, Trial
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.policies")
T = TypeVar("T")

Method = Literal["auto", "refit", "switch"]
"""`refit` exchanges the weights of the running engine; `switch` starts a second engine and then changes over; `auto` is
`refit` where one engine can hold both policies, else `switch`."""


@dataclass(frozen=True)
class Operation:
    """What is being done now.

    Attributes:
        name: `activate`, `deactivate`, `rollback`, `canary`, `shadow`, `promote` or `drop`.
        policy: its label, or None.
        since: seconds since the epoch.
    """

    name: str
    policy: str | None
    since: float


class Activator:
    """Changes which policies serve. A failed operation leaves what served before it.

    Args:
        services: what it changes.
        registry: where policies come from.
        audit: what every operation is written to, before and after.
        settings: time-outs.
        state_path: where the active policy's label is kept for the next start.
        open_shadow: makes what stores a shadow's answers.
    """

    def __init__(
        self,
        services: Services,
        registry: Registry,
        audit: AuditLog,
        settings: Settings,
        state_path: Path,
        open_shadow: Callable[[Service], Shadow],
    ) -> None:
        self.registry = registry
        self.audit = audit
        self.operation: Operation | None = None
        self._services = services
        self._settings = settings
        self._state_path = state_path
        self._shadow = open_shadow
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="policies")
        self._tasks: set[asyncio.Task[Any]] = set()

    async def activate(self, label: str, *, method: Method = "auto", actor: str) -> dict[str, Any]:
        """Makes a policy of the registry the active one.

        Raises:
            TraceServeError: it may not be served, or no engine could be brought to serve it; the old one serves on.
            ApiError: 409, another operation is running; 503, there is no engine to refit.
        """
        return await self._operate("activate", label, actor, lambda: self._activate(label, method))

    async def rollback(self, *, actor: str) -> dict[str, Any]:
        """Makes the policy active again that was before, with everything about it checked again.

        Raises:
            ConfigError: there is none.
            TraceServeError, ApiError: as `activate`.
        """
        previous = self._services.previous
        label = None if previous is None else previous.label
        return await self._operate("rollback", label, actor, lambda: self._activate(_require(label), "auto"))

    async def deactivate(self, *, actor: str) -> dict[str, Any]:
        """Takes the active policy, and a candidate, out of service; running requests may finish.

        Raises:
            ConfigError: no policy is active.
            ApiError: 409, another operation is running.
        """
        return await self._operate("deactivate", self._label(self._services.active), actor, self._deactivate)

    async def try_beside(self, label: str, trial: Trial, share: float, *, actor: str) -> dict[str, Any]:
        """Starts a second engine that answers a share of the requests (canary), or gets copies of them (shadow).

        A shadow's answers reach no client, so it needs no verdict: that is where one comes from.

        Raises:
            ConfigError: no policy is active, or another candidate is being tried.
            TraceServeError: it may not be served, or its engine did not start.
            ApiError: 409, another operation is running.
        """
        return await self._operate(trial, label, actor, lambda: self._try_beside(label, trial, share), share=share)

    async def promote(self, *, actor: str) -> dict[str, Any]:
        """Makes the canary the active policy; nothing is loaded for it.

        Raises:
            ConfigError: there is no canary that is ready.
            ApiError: 409, another operation is running.
        """
        return await self._operate("promote", self._candidate_label(), actor, self._promote)

    async def drop(self, *, actor: str) -> dict[str, Any]:
        """Ends the trial of the candidate; its running requests may finish.

        Raises:
            ConfigError: there is none.
            ApiError: 409, another operation is running.
        """
        return await self._operate("drop", self._candidate_label(), actor, self._drop)

    def remembered(self) -> str | None:
        """The label that was active when an earlier server ended."""
        try:
            label = json.loads(self._state_path.read_text("utf-8"))["active"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return label if isinstance(label, str) else None

    def state(self) -> dict[str, Any]:
        """What serves, what is tried, and what is being done."""
        services, operation = self._services, self.operation
        candidate = services.candidate
        return {
            "active": _service_state(services.active),
            "candidate": candidate
            and {**(_service_state(candidate.service) or {}), "trial": candidate.trial, "share": candidate.share},
            "previous": None if services.previous is None else services.previous.label,
            "operation": None if operation is None else vars(operation),
            "audit_head": self.audit.head,
        }

    async def entries(self) -> list[dict[str, Any]]:
        """The registry, each policy with its part in serving."""
        return await self.in_thread(lambda: [self.registry.describe(entry) for entry in self.registry.entries()])

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.audit.close()

    # One at a time, whoever asks; a client that leaves does not stop what it began.

    async def _operate(
        self,
        name: str,
        label: str | None,
        actor: str,
        work: Callable[[], Awaitable[Authorization | None]],
        **details: Any,
    ) -> dict[str, Any]:
        if self.operation is not None:
            running = self.operation
            raise ApiError(
                409,
                f"{running.name} of {running.policy} is running since {time.time() - running.since:.0f} s; wait for it",
                kind="invalid_request_error",
                code="operation_running",
                retry_after_s=5.0,
            )
        self.operation = Operation(name, label, time.time())
        task = asyncio.create_task(self._audited(name, label, actor, work, details))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _audited(
        self,
        name: str,
        label: str | None,
        actor: str,
        work: Callable[[], Awaitable[Authorization | None]],
        details: dict[str, Any],
    ) -> dict[str, Any]:
        began = time.monotonic()
        try:
            self.audit.append(name, actor=actor, policy=label, phase="begin", **details)
            done = await work()
        except BaseException as exc:
            reason = str(exc) or type(exc).__name__
            self.audit.append(name, actor=actor, policy=label, phase="failed", reason=reason)
            log.error("operation_failed", operation=name, policy=label, reason=reason, audit_head=self.audit.head)
            raise
        finally:
            self.operation = None
        seconds = round(time.monotonic() - began, 3)
        proof = {} if done is None else {"digest": done.digest, "verdict": done.verdict_id}
        self.audit.append(name, actor=actor, policy=label, phase="done", seconds=seconds, **proof)
        log.info("operation_done", operation=name, policy=label, seconds=seconds, audit_head=self.audit.head)
        return {"operation": name, "policy": label, "seconds": seconds, **self.state()}

    async def _activate(self, label: str, method: Method) -> Authorization:
        new = await self.in_thread(lambda: self.registry.authorize(label))
        active = self._services.active
        if active is not None and active.authorization.digest == new.digest and active.as_authorized and active.ready:
            raise ConfigError(f"policy: {new.label} is active already", field="policy")
        same = active is not None and new.interchange_id == active.authorization.interchange_id != ""
        if method == "refit" and not same:
            raise ConfigError(
                f"method: got 'refit', but {new.label} has another architecture, recipe or tokenizer than the active "
                "policy; expected 'switch'",
                field="method",
            )
        old = None if active is None else active.authorization
        if active is not None and same and method != "switch" and active.ready:
            await active.refit(new, drain_s=self._settings.drain_s)
        else:
            await self._switch(new)
        self._remember(old)
        return new

    async def _switch(self, new: Authorization) -> None:
        service = await self._start(new)
        old, self._services.active = self._services.active, service
        if old is not None:
            self._services.retire(old, drain_s=self._settings.drain_s)

    async def _start(self, authorization: Authorization) -> Service:
        service = self._services.start(authorization)
        try:
            await service.wait_ready(self._settings.engine_start_timeout_s)
        except BaseException:
            await service.stop()
            raise
        return service

    async def _deactivate(self) -> None:
        active = self._services.active
        if active is None:
            raise ConfigError("policy: none is active", field="policy")
        if self._services.candidate is not None:
            await self._drop()
        self._services.active = None
        self._services.retire(active, drain_s=self._settings.drain_s)
        self._remember(active.authorization)

    async def _try_beside(self, label: str, trial: Trial, share: float) -> Authorization:
        if self._services.active is None:
            raise ConfigError(f"{trial}: no policy is active to try another beside", field="policy")
        current = self._services.candidate
        if current is not None and current.service.authorization.label == label and current.trial == trial:
            self._services.candidate = replace(current, share=share)
            return current.service.authorization
        if current is not None:
            raise ConfigError(
                f"{trial}: {current.service.authorization.label} is being tried; promote or drop it first",
                field="policy",
            )
        judged = trial == "canary"
        new = await self.in_thread(lambda: self.registry.authorize(label, judged=judged))
        service = await self._start(new)
        try:
            shadow = self._shadow(service) if trial == "shadow" else None
        except ConfigError:
            await service.stop()
            raise
        self._services.candidate = Candidate(service, trial, share, shadow)
        return new

    async def _promote(self) -> Authorization:
        candidate, old = self._services.candidate, self._services.active
        if candidate is None or candidate.trial != "canary" or not candidate.service.ready:
            raise ConfigError("promote: there is no canary that is ready", field="policy")
        self._services.active, self._services.candidate = candidate.service, None
        if old is not None:
            self._services.retire(old, drain_s=self._settings.drain_s)
        self._remember(None if old is None else old.authorization)
        return candidate.service.authorization

    async def _drop(self) -> None:
        candidate = self._services.candidate
        if candidate is None:
            raise ConfigError("drop: there is no candidate", field="policy")
        self._services.end_trial(candidate, drain_s=self._settings.drain_s)

    def _remember(self, old: Authorization | None) -> None:
        self._services.previous = old
        self._services.reason = "no policy is active"
        temporary = self._state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"active": self._label(self._services.active)}), encoding="utf-8")
        temporary.replace(self._state_path)

    def _candidate_label(self) -> str | None:
        candidate = self._services.candidate
        return None if candidate is None else candidate.service.authorization.label

    @staticmethod
    def _label(service: Service | None) -> str | None:
        return None if service is None else service.authorization.label


def _service_state(service: Service | None) -> dict[str, Any] | None:
    if service is None:
        return None
    authorization, supervisor = service.authorization, service.supervisor
    expires = authorization.verdict_expires
    return {
        "policy": authorization.label,
        "digest": authorization.digest,
        "recipe_id": authorization.recipe.recipe_id,
        "verdict_id": authorization.verdict_id,
        "verdict_expires": None if expires is None else expires.isoformat(),
        "ready": service.ready,
        "reason": None if service.ready else supervisor.doubt or supervisor.reason,
        "requests": len(service.flights),
        "restarts": supervisor.restarts,
    }


def _require(label: str | None) -> str:
    if label is None:
        raise ConfigError("rollback: no other policy was active before", field="policy")
    return label
