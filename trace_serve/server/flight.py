"""One request on its way: what it holds, and the ways it can be cut short."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiohttp
from starlette.types import Receive

from trace_serve.server.admission import Ticket
from trace_serve.server.engine_client import EngineClient, EngineView
from trace_serve.server.errors import ApiError

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection, or reads nothing any more."""


def mint_request_id() -> str:
    return f"trace-{secrets.token_hex(16)}"


class Flight:
    """Owns a request's place in the engine and its upstream connection; `close` gives both back, once.

    Args:
        rid: the id minted for this request.
        engine: the engine that was in service when the request came; the one that it enters may be another.
        client: how to reach it.
        receive: the ASGI channel, whose body has been read, so that only a disconnect can come.
    """

    def __init__(self, rid: str, engine: EngineView, client: EngineClient, receive: Receive) -> None:
        self.rid = rid
        self.engine = engine
        self.started_at = time.monotonic()
        self.ticket: Ticket | None = None
        self.upstream: aiohttp.ClientResponse | None = None
        self.sent = False
        self.complete = False
        self._client = client
        self._receive = receive
        self._cut = asyncio.Event()
        self._cut_error: ApiError | None = None
        self._closed = False
        self._inside: set[Flight] | None = None

    def inside(self, flights: set[Flight]) -> None:
        """Joins the requests of one engine until `close`."""
        self._inside = flights
        flights.add(self)

    def cut(self, error: ApiError) -> None:
        """Ends the request with an error as soon as the event loop gets to it."""
        if self._cut_error is None:
            self._cut_error = error
            self._cut.set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs one stage of the request, and stops it when the client leaves or the request is cut.

        Raises:
            ClientGoneError: the client left first.
            ApiError: the request was cut, or the work raised it.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._wait_until_gone())
        cut = asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait({task, gone, cut}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._cut_error is not None:
                raise self._cut_error
            raise ClientGoneError
        finally:
            for each in (task, gone, cut):
                each.cancel()
            await asyncio.gather(task, gone, cut, return_exceptions=True)

    def close(self) -> None:
        """Closes upstream, frees the place, and has the engine drop an unfinished request."""
        if self._closed:
            return
        self._closed = True
        if self._inside is not None:
            self._inside.discard(self)
        if self.upstream is not None:
            if self.complete:
                self.upstream.release()
            else:
                self.upstream.close()
        if self.sent and not self.complete:
            self._client.abort(self.engine, self.rid)
        if self.ticket is not None:
            self.ticket.release()

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
