"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")


class Page:
    """One tab.

    Attributes:
        complaints: console errors, exceptions and refused loads that the page caused.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._origin = "file:"
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, page: Path | str) -> None:
        """Loads a file, or a URL of a server; requests to anywhere else are complaints."""
        url = page.as_uri() if isinstance(page, Path) else page
        self._origin = "file:" if isinstance(page, Path) else "/".join(url.split("/", 3)[:3]) + "/"
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        deadline = time.monotonic() + 30
        while await self.evaluate("document.readyState + location.href") != f"complete{url}":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    def _note(self, message: dict[str, Any]) -> None:
        method, details = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and details.get("type") in ("error", "warning")
        ):
            self.complaints.append(json.dumps(details))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(details["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = details["request"]["url"]
            if not url.startswith((self._origin, "data:")):
                self.complaints.append(f"asks for {url}")


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    process = subprocess.Popen(
        [CHROMIUM, *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
        start_new_session=True,
    )
    try:
        place = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not place.exists() or not place.read_text().strip():
            assert process.poll() is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        port = place.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(item for item in await answer.json() if item["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(10)
