"""Shadow traffic: copies of requests for a candidate, and both answers stored for the gate.

`DIR/active.jsonl` and `DIR/candidate.jsonl` are request logs with the same ids, so `eval-gate convert` reads either.
The client's answer never waits for the copy, and no error of the candidate reaches it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import structlog

from trace_serve.errors import ConfigError
from trace_serve.server.engines.client import EngineClient
from trace_serve.server.observe.request_log import Result, open_log
from trace_serve.server.observe.request_log_record import Exchange
from trace_serve.server.service import Service
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.shadow")

MAX_IN_FLIGHT = 8
"""Copies inside the candidate's engine at once; more are dropped and counted, so that it never falls behind."""
CLOSE_S = 5.0


class Shadow:
    """One trial: asks the candidate and writes both answers down.

    Args:
        service: the candidate's.
        client: HTTP to engines.
        settings: redaction and sizes of the two logs, and the engine's time-out.
        directory: made if it is missing.
        count: told what became of each copy: `stored`, `dropped`, `failed` or what its log made of it.

    Raises:
        ConfigError: the directory cannot be written, or no redaction was chosen.
    """

    def __init__(
        self,
        service: Service,
        client: EngineClient,
        settings: Settings,
        directory: Path,
        count: Callable[[str], None],
    ) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{directory}: cannot be made ({exc.strerror})", field="state_dir") from exc
        self.directory = directory
        self._service = service
        self._client = client
        self._timeout_s = settings.upstream_idle_s
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()
        self._active = open_log(directory / "active.jsonl", settings, self._logged)
        self._candidate = open_log(directory / "candidate.jsonl", settings, self._logged)

    def copy(self, route: str, payload: dict[str, Any]) -> Callable[[Exchange], None]:
        """What to call with the active policy's exchange once it has ended.

        Args:
            route: path at the engine.
            payload: what the active policy's engine was sent.
        """

        def ended(exchange: Exchange) -> None:
            if exchange.outcome != "ok":
                return
            if len(self._tasks) >= MAX_IN_FLIGHT:
                self._count("dropped")
                return
            task = asyncio.get_running_loop().create_task(self._ask(route, payload, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return ended

    async def close(self) -> None:
        """Ends the copies that run, and writes what waits, for some seconds at most."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in (self._active, self._candidate):
            await asyncio.to_thread(each.close, CLOSE_S)

    async def _ask(self, route: str, payload: dict[str, Any], exchange: Exchange) -> None:
        engine = self._service.supervisor.engine
        if engine is None:
            self._count("failed")
            return
        ours = {name: value for name, value in payload.items() if name not in ("stream_options", "custom_params")}
        ours |= {"stream": False, "model": engine.served_name, "rid": f"shadow-{exchange.id}"}
        try:
            answer = await self._client.post_json(engine, route, ours, timeout_s=self._timeout_s)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            self._count("failed")
            log.warning("shadow_failed", request_id=exchange.id, reason=str(exc) or type(exc).__name__)
            return
        except asyncio.CancelledError:
            self._client.abort(engine, ours["rid"])
            raise
        if "choices" not in answer:
            self._count("failed")
            log.warning("shadow_refused", request_id=exchange.id, reason=str(answer)[:300])
            return
        authorization = self._service.authorization
        self._active.submit(exchange)
        self._candidate.submit(
            replace(
                exchange,
                at=time.time(),
                policy=authorization.label,
                digest=authorization.digest,
                response=orjson.dumps(answer),
                streamed=False,
            )
        )
        self._count("stored")

    def _logged(self, result: Result) -> None:
        if result != "written":
            self._count(result)
