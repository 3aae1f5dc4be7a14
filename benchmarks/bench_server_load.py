"""The load generator of bench_server.py, in a process of its own: a fixed number of clients, each asking again at once.

Speaks just enough HTTP/1.1 to be cheaper than everything it measures. Writes one JSON object: for each request the
seconds to the first `data:` and to the end, and the events received.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

END = b"0\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection that sends the given requests one after the other and times the streamed answers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        request = self._run.next_request()
        if request is None:
            self._transport.close()
            self.done.set_result(None)
            return
        self._first_s = 0.0
        self._events = 0
        self._tail = b""
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._first_s:
            self._tail += data
            if not self._tail.startswith(b"HTTP/1.1 200"):
                self._fail(self._tail.decode("utf-8", "replace"))
                return
            if b"data:" not in self._tail:
                return
            self._first_s = time.perf_counter() - self._began
            data = self._tail
        self._events += data.count(b"data:")
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END:
            self._run.times.append((self._first_s, time.perf_counter() - self._began, self._events))
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(f"connection lost: {error}")

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"{self._run.target}: {reason[:500]}"))
        self._transport.close()


class Run:
    """What the clients share: the requests that are left, until the count or the time is used up."""

    def __init__(self, target: str, requests: list[bytes], count: int | None, seconds: float | None) -> None:
        self.target = target
        self._requests = requests
        self._count = count
        self._until = None if seconds is None else time.perf_counter() + seconds
        self._asked = 0
        self.times: list[tuple[float, float, int]] = []

    def next_request(self) -> bytes | None:
        if self._asked == self._count or (self._until is not None and time.perf_counter() > self._until):
            return None
        self._asked += 1
        return self._requests[self._asked % len(self._requests)]


def encode(url: str, key: str | None, body: dict[str, Any]) -> bytes:
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    bearer = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{bearer}content-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def load(order: dict[str, Any]) -> dict[str, Any]:
    """Runs one block.

    Args:
        order: `url`, `key`, `bodies` (sent in turn), `concurrency`, and `count` requests or `seconds`.
    """
    parts = urlsplit(order["url"])
    requests = [encode(order["url"], order.get("key"), body) for body in order["bodies"]]
    loop = asyncio.get_running_loop()
    began, cpu = time.perf_counter(), time.process_time()
    run = Run(order["url"], requests, order.get("count"), order.get("seconds"))
    connections = (
        loop.create_connection(lambda: Client(run), parts.hostname, parts.port) for _ in range(order["concurrency"])
    )
    clients = [protocol for _, protocol in await asyncio.gather(*connections)]
    await asyncio.gather(*(client.done for client in clients))
    first, total, events = zip(*run.times, strict=True)
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "first_s": first,
        "total_s": total,
        "events": min(events),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file for the result; the order is JSON on standard input")
    options = parser.parse_args()
    options.out.write_text(json.dumps(uvloop.run(load(json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
