"""One request on its way: what it holds, and the ways it can be cut short."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
from starlette.types import Receive

from trace_serve.server.admission.admission import Ticket
from trace_serve.server.engines.client import EngineClient, EngineLoad, EngineView
from trace_serve.server.errors import ApiError

T = TypeVar("T")
EOF_GRACE_S = 1.0


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
        self._engine = engine
        self._entered: EngineLoad | None = None
        self.reroute: Callable[[EngineView], EngineView | None] = lambda _: None
        """Another engine for a request that could not be sent to the one given; set where there may be several."""
        self.started_at = time.monotonic()
        self.ticket: Ticket | None = None
        self.upstream: aiohttp.ClientResponse | None = None
        self.sent = False
        self.trace_headers: dict[str, str] = {}
        self.complete = False
        self.metadata: dict[str, Any] | None = None
        self._client = client
        self._receive = receive
        self._ended: ApiError | ClientGoneError | None = None
        self._stage: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        self._inside: set[Flight] | None = None

    @property
    def engine(self) -> EngineView:
        return self._engine

    @engine.setter
    def engine(self, engine: EngineView) -> None:
        """Enters an engine, and leaves the one before."""
        self._leave()
        self._engine = engine
        self._entered = engine.load
        engine.load.in_flight += 1

    def inside(self, flights: set[Flight]) -> None:
        """Joins the requests of one engine until `close`."""
        self._inside = flights
        flights.add(self)

    def cut(self, error: ApiError) -> None:
        """Ends the request with an error as soon as the event loop gets to it."""
        self._end(error)

    def client_stalled(self) -> None:
        """Ends the request as if its client had left."""
        self._end(ClientGoneError())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs one stage of the request, and stops it when the client leaves or the request is cut.

        The stage runs in the request's own task and is cancelled from outside, as by `asyncio.timeout`: one task that
        listens for the client serves all stages.

        Raises:
            ClientGoneError: the client left first.
            ApiError: the request was cut, or the work raised it.
        """
        if self._ended is not None:
            work.close()
            raise self._ended
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._wait_until_gone())
        self._stage = stage = asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            if self._ended is None or stage is None:
                raise
            if stage.uncancel() > 0:
                raise  # something else cancelled the task as well
            raise self._ended from None
        finally:
            self._stage = None

    def close(self) -> None:
        """Closes upstream, frees the place, and has the engine drop an unfinished request."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._inside is not None:
            self._inside.discard(self)
        if self.upstream is not None:
            if not self.complete:
                self.upstream.close()
            elif self.upstream.content.is_eof():
                self.upstream.release()
            else:
                # The end of the body follows its last event as a piece of its own; once read, the connection is reused.
                asyncio.get_running_loop().call_later(EOF_GRACE_S, self.upstream.release)
        if self.sent and not self.complete:
            self._client.abort(self.engine, self.rid)
        if self.ticket is not None:
            self.ticket.release()

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.in_flight -= 1
            self._entered = None

    def _end(self, reason: ApiError | ClientGoneError) -> None:
        if self._ended is None:
            self._ended = reason
            if self._stage is not None:
                self._stage.cancel()

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.complete:  # a server also says so once the whole answer has been sent
            self._end(ClientGoneError())
