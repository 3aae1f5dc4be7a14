"""Under a mix of good, bad, slow and leaving clients the server serves, and returns to where it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
from harness import Running

CHAT = "/v1/chat/completions"
SOAK_S = 6.0
ENGINE_CONNECTIONS = 12
"""As many as a heartbeat every 0.2 s can keep from reaching the age of 2 s at which they are given up, and two more."""
KEY = "a-client-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Few places, a short queue, and impatience with slow readers; the engine may be late on a loaded machine."""
    limits = {"max_in_flight": 8, "max_queue": 8, "client_stall_s": 0.5, "queue_timeout_s": 2, "heartbeat_misses": 60}
    with Running(tmp_path_factory.mktemp("busy"), api_key=KEY, log_level="error", **limits) as running:
        yield running


def server(running: Running) -> psutil.Process:
    return psutil.Process(running.process.pid)


def gauge(running: Running, name: str) -> float:
    text = httpx.get(running.url + "/metrics", timeout=20).text
    return float(next(line for line in text.splitlines() if line.startswith(f"trace_serve_{name} ")).split()[1])


def body(script: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script}], **fields}


def wait_until(check: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.2)


class Level:
    """What a server holds on to, measured while it is idle.

    Connections to the engine are counted apart: heartbeats take them in turn, so that some of them never grow old.
    """

    def __init__(self, running: Running) -> None:
        process = server(running)
        engine_port = int(running.engine()["url"].rsplit(":", 1)[1])
        self.to_engine = sum(bool(c.raddr) and c.raddr.port == engine_port for c in process.net_connections("inet"))
        self.fds = process.num_fds() - self.to_engine
        self.tasks = gauge(running, "event_loop_tasks")
        self.rss = process.memory_info().rss

    def __repr__(self) -> str:
        files = f"{self.fds} file descriptors and {self.to_engine} to the engine"
        return f"{files}, {self.tasks:g} tasks, {self.rss >> 20} MiB"


def idle(running: Running) -> bool:
    return gauge(running, "in_flight_requests") == gauge(running, "queued_requests") == 0


class Mix:
    """Clients of every kind, chosen with a seed; each coroutine is one request."""

    def __init__(self, running: Running, session: aiohttp.ClientSession) -> None:
        self.running = running
        self.session = session
        self.seen: Counter[str] = Counter()

    async def good(self) -> None:
        async with self.session.post(CHAT, json=body("tokens=2")) as answer:
            self.seen[f"good {answer.status}"] += 1

    async def streamed(self) -> None:
        async with self.session.post(CHAT, json=body("tokens=5 delay=0.01", stream=True)) as answer:
            text = await answer.text()
            if answer.status == 200:
                assert text.endswith("data: [DONE]\n\n")
            self.seen[f"streamed {answer.status}"] += 1

    async def bad(self) -> None:
        async with self.session.post(CHAT, json={**body("x"), "n": 0}) as answer:
            assert answer.status == 400
            self.seen["bad 400"] += 1

    async def stranger(self) -> None:
        async with self.session.post(CHAT, json=body("x"), headers={"authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401
            self.seen["stranger 401"] += 1

    async def failing(self) -> None:
        async with self.session.post(CHAT, json=body("tokens=3 cut_after=1", stream=True)) as answer:
            assert "[DONE]" not in await answer.text()
            self.seen["failing"] += 1

    async def leaving(self) -> None:
        with contextlib.suppress(TimeoutError):
            timeout = aiohttp.ClientTimeout(total=random.uniform(0.05, 0.4))
            script = random.choice(["hang=1", "tokens=100 delay=0.05"])
            payload = body(script, stream=random.random() < 0.5)
            async with self.session.post(CHAT, json=payload, timeout=timeout) as answer:
                await answer.read()
        self.seen["leaving"] += 1

    async def unread(self) -> None:
        """Asks for a long stream and takes none of it."""
        data = json.dumps(body("tokens=20000", stream=True)).encode()
        writer = await self._send(data, promised=len(data))
        await asyncio.sleep(1.0)
        writer.transport.abort()
        self.seen["unread"] += 1

    async def half_sent(self) -> None:
        """Promises a body and goes away in the middle of it."""
        writer = await self._send(b"{", promised=1000)
        await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.seen["half sent"] += 1

    async def _send(self, data: bytes, *, promised: int) -> asyncio.StreamWriter:
        host, port = self.running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        lines = [
            f"POST {CHAT} HTTP/1.1",
            f"host: {host}",
            f"authorization: Bearer {KEY}",
            f"content-length: {promised}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        return writer


async def soak(running: Running, seconds: float) -> Counter[str]:
    dice = random.Random(7)
    # Connections are given up before the server would close them, which could be while a request is on its way.
    connector = aiohttp.TCPConnector(keepalive_timeout=1.0)
    async with aiohttp.ClientSession(running.url, headers=HEADERS, connector=connector) as session:
        mix = Mix(running, session)
        kinds = [mix.good, mix.streamed, mix.bad, mix.stranger, mix.failing, mix.leaving, mix.unread, mix.half_sent]
        weights = [6, 4, 3, 2, 1, 4, 1, 2]
        deadline = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < deadline:
                await dice.choices(kinds, weights)[0]()

        await asyncio.gather(*(client() for _ in range(24)))
        return mix.seen


async def test_a_soak_of_mixed_clients_leaves_the_server_as_it_was(busy: Running) -> None:
    before = await asyncio.to_thread(Level, busy)
    await soak(busy, 2.0)  # caches, pools and the allocator reach their level
    await asyncio.to_thread(wait_until, lambda: idle(busy), 30)
    before.rss = server(busy).memory_info().rss
    seen = await soak(busy, SOAK_S)
    for kind in ("good 200", "streamed 200", "bad 400", "stranger 401", "failing", "leaving", "unread", "half sent"):
        assert seen[kind] > 0, seen
    await asyncio.to_thread(wait_until, lambda: idle(busy) and busy.seen()["running"] == 0, 30)

    def returned() -> bool:
        now = Level(busy)
        if now.to_engine > ENGINE_CONNECTIONS or now.rss >= before.rss + (16 << 20):
            return False
        return now.fds <= before.fds + 2 and now.tasks <= before.tasks + 2

    try:
        await asyncio.to_thread(wait_until, returned, 30)
    except AssertionError:
        pytest.fail(f"before: {before}; after: {await asyncio.to_thread(Level, busy)}; {seen}")
    assert httpx.post(busy.url + CHAT, json=body("tokens=1"), headers=HEADERS, timeout=20).status_code == 200


async def refuse_many(running: Running, count: int) -> Counter[int]:
    """Refused requests of every reason: no key, a bad field, a key's limit, a full queue."""
    seen: Counter[int] = Counter()
    async with aiohttp.ClientSession(
        running.url, connector=aiohttp.TCPConnector(limit=16, keepalive_timeout=1.0)
    ) as session:

        async def one(index: int) -> None:
            headers = HEADERS if index % 4 else {"authorization": f"Bearer wrong-{index}"}
            payload = {**body("x" * 2000), "n": 0} if index % 2 else body(f"hang={index}")
            async with session.post(CHAT, json=payload, headers=headers) as answer:
                await answer.read()
                seen[answer.status] += 1

        async def worker(start: int) -> None:
            for index in range(start, count, 16):
                await one(index)

        await asyncio.gather(*(worker(start) for start in range(16)))
    return seen


async def test_ten_thousand_refused_requests_leave_memory_flat(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("full")
    limits = {"max_in_flight": 1, "max_queue": 0, "heartbeat_misses": 60}
    with Running(directory, api_key=KEY, log_level="error", **limits) as running:
        async with aiohttp.ClientSession(running.url, headers=HEADERS) as session:
            holder = asyncio.create_task(session.post(CHAT, json=body("hang=1")))
            await asyncio.to_thread(wait_until, lambda: running.seen()["running"] == 1, 20)
            await refuse_many(running, 1_000)
            before = server(running).memory_info().rss
            seen = await refuse_many(running, 10_000)
            after = server(running).memory_info().rss
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)
    assert set(seen) == {400, 401, 503}
    assert sum(seen.values()) == 10_000
    assert after - before < 8 << 20
