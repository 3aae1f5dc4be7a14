"""uvicorn's HTTP protocol with bounds on the head of a request, which uvicorn leaves open.

Without them a client that sends its headers a byte a minute holds a connection for ever, and one that never ends them
fills the memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers, where they do not arrive in one piece."""


def bounded_protocol(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class for `uvicorn.Config(http=...)`.

    Args:
        head_timeout_s: from a connection's or a request's first byte until its headers are complete; then the
            connection is closed.
    """

    class Bounded(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._timer: asyncio.TimerHandle | None = None
            self._head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._timer is not None and not self.transport.is_closing():
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.send_400_response(f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._expect_head()

        def on_headers_complete(self) -> None:
            self._have_head()
            super().on_headers_complete()

        def _expect_head(self) -> None:
            if self._timer is None:
                self._head_bytes = 0
                self._timer = self.loop.call_later(head_timeout_s, self.transport.close)

        def _have_head(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Bounded
