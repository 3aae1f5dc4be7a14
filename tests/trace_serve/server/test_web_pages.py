"""The pages in a real headless Chromium, over the front-end and the scripted engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from harness import Running
from headless import Page, browser, needs_chromium
from scripted_engine import TEXT

pytestmark = needs_chromium

SHOWN = "document.getElementById({id!r}).innerText"


async def until(page: Page, expression: str) -> None:
    """Waits for something to be true in the page."""
    deadline = time.monotonic() + 60
    while not await page.evaluate(f"Boolean({expression})"):
        assert time.monotonic() < deadline, await page.evaluate("document.body.innerText")
        await asyncio.sleep(0.05)


async def shown(page: Page, name: str) -> str:
    return str(await page.evaluate(SHOWN.format(id=name)))


async def fill(page: Page, name: str, value: str) -> None:
    await page.evaluate(f"document.getElementById({name!r}).value = {value!r}")


async def send(page: Page, text: str) -> None:
    await fill(page, "text", text)
    await page.evaluate("document.getElementById('ask').requestSubmit()")


async def test_a_key_opens_the_policy_and_an_answer_streams_in(shared: Running, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as page:
        await page.open(shared.url + "/")
        assert await page.evaluate("document.getElementById('send').disabled")
        await fill(page, "key", str(shared.api_key))
        await page.evaluate("document.getElementById('connect').requestSubmit()")
        await until(page, "!document.getElementById('send').disabled")
        assert await shown(page, "name") == "scripted@1"
        assert await shown(page, "verdict") == "PASS, signed: sha256:verdict"

        await send(page, "tokens=3 delay=0.05")
        await until(page, "document.querySelectorAll('.assistant .facts').length === 1")
        assert await page.evaluate("document.querySelector('.assistant').firstChild.textContent") == TEXT * 3
        assert "3 tokens" in await page.evaluate("document.querySelector('.assistant .facts').innerText")
        assert await shown(page, "weights") == "default"

        await page.evaluate("document.getElementById('wanthints').checked = true")
        await send(page, "tokens=1 delay=0.5")
        await until(page, "document.querySelectorAll('.assistant').length === 2")
        rollout = await newest_rollout(shared)
        (shared.hint_dir / f"{rollout}.safetensors").write_bytes(b"x" * 4321)
        await until(page, "document.getElementById('hints').innerText.includes('4321 bytes')")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.complaints == []


async def newest_rollout(running: Running) -> str:
    """The id of the request for hints that the engine has seen last."""
    deadline = time.monotonic() + 30
    while True:
        seen = await asyncio.to_thread(running.seen)
        asked = [each["rid"] for each in seen["seen"] if "trace_hints" in (each.get("custom_params") or {})]
        if asked:
            return str(asked[-1])
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_wrong_key_and_a_failed_answer_are_told(shared: Running, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as page:
        await page.open(shared.url + "/")
        await page.evaluate("document.getElementById('connect').requestSubmit()")
        await until(page, "document.getElementById('state').className === 'bad'")
        assert "API key" in await shown(page, "state")
        await fill(page, "key", str(shared.api_key))
        await page.evaluate("document.getElementById('connect').requestSubmit()")
        await until(page, "!document.getElementById('send').disabled")
        await send(page, "tokens=4 error_after=2")
        await until(page, "document.querySelector('.assistant .bad')")
        assert "scripted failure" in await page.evaluate("document.querySelector('.assistant .bad').innerText")
        assert await page.evaluate("document.querySelector('.assistant').firstChild.textContent") == TEXT * 2
        # Chromium itself notes the refused request on the console; the page adds nothing to that.
        assert [text for text in page.complaints if "401" not in text] == []


async def test_the_api_page_shows_every_operation(shared: Running, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as page:
        await page.open(shared.url + "/docs")
        await until(page, "document.querySelectorAll('details.operation').length >= 15")
        chat = await page.evaluate("document.getElementById('chat').textContent")
        for words in ("/v1/chat/completions", "top_logprobs", "from 0, to 20", "trace_hints", "429"):
            assert words in chat
        assert page.complaints == []
