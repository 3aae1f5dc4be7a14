"""Keeps one engine process running: starts it, listens to its heartbeat, kills and restarts it when it fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import aiohttp
import structlog

from trace_serve.errors import ConfigError, EngineError, SeamError, TraceServeError
from trace_serve.server.engines.client import EngineClient, EngineView
from trace_serve.server.limits import Limits
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.supervisor")
T = TypeVar("T")
KILL_GRACE_S = 1.0


class EngineLike(Protocol):
    """What the supervisor needs of an engine process; `trace_serve.engine.launch.EngineProcess` is one."""

    @property
    def url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def served_name(self) -> str: ...

    def start(self) -> None: ...

    def wait_ready(self, timeout_s: float) -> object:
        """Blocks until the engine answers. Raises EngineError when it dies or takes longer."""

    def poll(self) -> int | None: ...

    def stop(self, timeout_s: float) -> None:
        """Ends the whole process group, by force after `timeout_s`."""


class Supervisor:
    """Runs as one task of the event loop; blocking calls of the engine go to threads of its own.

    Args:
        factory: makes a new, unstarted engine process for each attempt.
        client: for heartbeats and the report.
        settings: intervals, time-outs and restart limits.
        check_report: raises TraceServeError when the engine is not serving what was authorised.
        on_lost: called when the engine in service is lost, with the reason.
        on_give_up: called once when no further restart is tried.
    """

    def __init__(
        self,
        factory: Callable[[], EngineLike],
        client: EngineClient,
        settings: Settings,
        *,
        check_report: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        on_give_up: Callable[[TraceServeError], None],
    ) -> None:
        self._factory = factory
        self._client = client
        self._settings = settings
        self._check_report = check_report
        self._on_lost = on_lost
        self._on_give_up = on_give_up
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="engine")
        self._engine: EngineLike | None = None
        self._view: EngineView | None = None
        self._answers = False
        self._doubt: str | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._running: EngineLike | None = None
        self._unwanted: EngineError | None = None
        self.reason = "the engine is starting"
        self.failure: TraceServeError | None = None
        """Why no further restart is tried; None while one is."""
        self.weight_version: str | None = None
        """The engine's label of the weights that serve, as of its last heartbeat."""
        self.digest: str | None = None
        """Of the directory that those weights are from; empty where a trainer sent them, None where nothing is said."""
        self.restarts = 0

    @property
    def engine(self) -> EngineView | None:
        """The engine in service, or None while there is none that answers its heartbeat."""
        return self._view if self._answers else None

    @property
    def doubt(self) -> str | None:
        """Why the engine in service should get no new traffic, although it lives; None when all is well."""
        return self._doubt

    def alternative(self, refused: EngineView) -> EngineView | None:
        """Another engine for a request that could not be sent; one process has none."""
        return None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def refresh(self) -> None:
        """Reads and checks the report of the running engine again, after its weights were exchanged.

        Raises:
            EngineError: there is none, or it is not serving what was authorised.
        """
        engine = self._running
        if engine is None:
            raise EngineError(f"there is no engine: {self.reason}")
        self._view = await self._inspect(engine)
        await self._heartbeat_fault(engine)

    async def read_weight_version(self) -> None:
        """Asks the engine at once which weights serve, instead of at the next heartbeat."""
        if self._running is not None:
            await self._heartbeat_fault(self._running)

    def replace(self, reason: str) -> None:
        """Takes the engine out of service and has a new one started."""
        self._unwanted = EngineError(reason)
        self._lose(reason)

    async def stop(self) -> None:
        """Ends the engine, also one that is still starting, and waits for that."""
        self._stopping = True
        self._lose("the server is stopping")
        if self._engine is not None:
            await self._in_thread(self._engine.stop, self._settings.engine_stop_timeout_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        failures = 0
        while not self._stopping:
            self._engine = engine = self._factory()
            began = time.monotonic()
            error = await self._serve_once(engine)
            self._lose(str(error))
            await self._in_thread(engine.stop, KILL_GRACE_S)
            if self._stopping:
                return
            failures = 1 if time.monotonic() - began > self._settings.restart_reset_s else failures + 1
            log.error("engine_failed", reason=str(error), failures=failures, limit=self._settings.max_restarts)
            if failures > self._settings.max_restarts or isinstance(error, ConfigError | SeamError):
                self.reason = f"the engine failed and is not restarted: {error}"
                self.failure = error
                self._on_give_up(error)
                return
            self.restarts += 1
            wait = self._settings.restart_backoff_s * 2.0 ** (failures - 1)
            await asyncio.sleep(min(wait, self._settings.restart_backoff_max_s))

    async def _serve_once(self, engine: EngineLike) -> TraceServeError:
        """One life of the engine; returns why it ended."""
        try:
            await self._in_thread(engine.start)
            await self._in_thread(engine.wait_ready, self._settings.engine_start_timeout_s)
            self._view = await self._inspect(engine)
            self._running, self._unwanted = engine, None
            return await self._watch(engine)
        except TraceServeError as exc:
            return exc
        except OSError as exc:
            return EngineError(f"the engine process cannot be started: {exc}")
        finally:
            self._running = None

    async def _inspect(self, engine: EngineLike) -> EngineView:
        timeout_s = 5 * self._settings.heartbeat_timeout_s
        try:
            report = await self._client.get_json(engine.url, engine.api_key, "/trace/report", timeout_s=timeout_s)
            limits = Limits(context_length=int(report["context_length"]), vocab_size=int(report["vocab_size"]))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as exc:
            raise EngineError(f"the engine's report cannot be used: {exc!r}") from exc
        self._check_report(report)
        return EngineView(engine.url, engine.api_key, engine.served_name, limits, report)

    async def _watch(self, engine: EngineLike) -> EngineError:
        misses = 0
        while True:
            if self._unwanted is not None:
                return self._unwanted
            code = engine.poll()
            if code is not None:
                return EngineError(f"the engine process ended with code {code}")
            fault = await self._heartbeat_fault(engine)
            if isinstance(fault, EngineError):
                return fault
            misses = misses + 1 if fault else 0
            if fault is None and not self._answers:
                log.info("engine_ready", url=engine.url, restarts=self.restarts)
            elif fault:
                self.reason = f"the engine does not answer its heartbeat: {fault}"
                log.warning("heartbeat_missed", fault=fault, misses=misses)
            self._answers = fault is None and self._unwanted is None
            if misses >= self._settings.heartbeat_misses:
                return EngineError(f"the engine missed {misses} heartbeats: {fault}")
            await asyncio.sleep(self._settings.heartbeat_interval_s)

    async def _heartbeat_fault(self, engine: EngineLike) -> EngineError | str | None:
        """None for a live engine, a string for a missed beat, an error for a scheduler known to be frozen."""
        timeout_s = self._settings.heartbeat_timeout_s
        try:
            beat = await self._client.get_json(engine.url, engine.api_key, "/trace/heartbeat", timeout_s=timeout_s)
        except TimeoutError:
            return f"no answer in {timeout_s:g} s"
        except (aiohttp.ClientError, ValueError) as exc:
            return str(exc) or type(exc).__name__
        label = beat.get("weight_version")
        self.weight_version = label if isinstance(label, str) else None
        self.digest = str(beat["policy_digest"] or "") if "policy_digest" in beat else None
        age = beat.get("age_s")
        silent_s = float(age) if isinstance(age, int | float) else 0.0
        self._doubt = None
        if silent_s > self._settings.heartbeat_stale_s:
            self._doubt = f"the engine's scheduler gave its last sign of life {silent_s:.1f} s ago"
        elif beat.get("quarantined") is True:
            self._doubt = "the engine holds weights of two versions after a failed update and waits for a whole one"
        if beat.get("alive") is not True:
            return EngineError(f"the engine's scheduler shows no sign of life (last one {age} s ago)")
        return None

    def _lose(self, reason: str) -> None:
        had_view = self._view is not None
        self._view = None
        self._answers = False
        self._doubt = None
        self.reason = reason
        if had_view:
            self._on_lost(reason)

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
