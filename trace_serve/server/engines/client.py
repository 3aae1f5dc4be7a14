"""HTTP to the engine on loopback: one aiohttp session, the engine's bearer key on every request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from trace_serve.server.limits import Limits

ABORT_DELAYS_S = (0.0, 0.3, 1.0)
"""A request that has just been sent may not be known to the engine yet, so its abort is repeated."""


@dataclass
class EngineLoad:
    """Requests of this server that are inside one engine."""

    in_flight: int = 0


@dataclass(frozen=True)
class EngineView:
    """The engine in service, as requests see it.

    Attributes:
        url: base URL.
        api_key: the engine's own bearer key, never shown to a client.
        served_name: the model name that the engine answers to.
        limits: vocabulary and context length, from the engine's report.
        report: the engine's `/trace/report` when it became ready.
        load: how much of its work is ours; decides between several engines.
    """

    url: str
    api_key: str = field(repr=False)
    served_name: str
    limits: Limits
    report: dict[str, Any] = field(repr=False)
    load: EngineLoad = field(default_factory=EngineLoad, compare=False)


class EngineClient:
    """Owns the session; must be created and closed inside the event loop.

    Args:
        idle_s: longest silence of the engine within a request.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.idle_s = idle_s
        # The server closes idle connections after 5 s; giving them up earlier avoids sending into a closing one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=idle_s)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, headers={"accept-encoding": "identity"}
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self.aborted = 0
        """Requests that an engine was told to drop."""

    async def post(
        self, engine: EngineView, path: str, payload: dict[str, Any], trace_headers: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Sends a request and returns when headers have come; the caller closes the answer."""
        return await self._session.post(
            engine.url + path,
            data=orjson.dumps(payload),
            headers={
                "authorization": f"Bearer {engine.api_key}",
                "content-type": "application/json",
                **(trace_headers or {}),
            },
        )

    async def get_json(self, url: str, api_key: str, path: str, *, timeout_s: float) -> dict[str, Any]:
        """GETs a JSON object.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer, or not status 200.
            ValueError: not a JSON object.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"authorization": f"Bearer {api_key}"}
        async with self._session.get(url + path, headers=headers, timeout=timeout, raise_for_status=True) as answer:
            parsed = orjson.loads(await answer.read())
        if not isinstance(parsed, dict):
            raise ValueError(f"{path}: got {type(parsed).__name__}, expected a JSON object")
        return parsed

    async def get_text(self, url: str, api_key: str, path: str, *, timeout_s: float, max_bytes: int) -> str:
        """GETs a text in UTF-8.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer, or not status 200.
            ValueError: longer than `max_bytes`, or not UTF-8.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"authorization": f"Bearer {api_key}"}
        body = bytearray()
        async with self._session.get(url + path, headers=headers, timeout=timeout, raise_for_status=True) as answer:
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise ValueError(f"{path}: more than {max_bytes} bytes")
        return body.decode("utf-8")

    async def post_json(
        self, engine: EngineView, path: str, payload: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """POSTs to one of the engine's own routes and returns its JSON object, whatever the status.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer.
            ValueError: not a JSON object.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"authorization": f"Bearer {engine.api_key}"}
        async with self._session.post(engine.url + path, json=payload, headers=headers, timeout=timeout) as answer:
            parsed = orjson.loads(await answer.read())
        if not isinstance(parsed, dict):
            raise ValueError(f"{path}: got {type(parsed).__name__}, expected a JSON object")
        return parsed

    async def pass_on(
        self, engine: EngineView, path: str, body: AsyncIterator[bytes], *, timeout_s: float
    ) -> tuple[int, bytes]:
        """POSTs a body as it arrives, without keeping it; returns status and answer.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"authorization": f"Bearer {engine.api_key}", "content-type": "application/json"}
        async with self._session.post(engine.url + path, data=body, headers=headers, timeout=timeout) as answer:
            return answer.status, await answer.read()

    def abort(self, engine: EngineView, rid: str) -> None:
        """Tells the engine, in the background, to drop a request."""
        self.aborted += 1
        task = asyncio.get_running_loop().create_task(self._abort(engine, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, engine: EngineView, rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        headers = {"authorization": f"Bearer {engine.api_key}"}
        for delay in ABORT_DELAYS_S:
            await asyncio.sleep(delay)
            try:
                url = engine.url + "/abort_request"
                async with self._session.post(url, json={"rid": rid}, headers=headers, timeout=timeout):
                    pass
            except (aiohttp.ClientError, TimeoutError):
                return  # a dead or frozen engine is the supervisor's to deal with

    async def close(self) -> None:
        for task in list(self._aborts):
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._session.close()
