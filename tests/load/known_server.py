"""An OpenAI-style server of known delays, in a process of its own: `first=0.3 gap=0.02 tokens=5` in the prompt.

It notes what it really did, so that a test can tell the error of the load generator from the noise of the machine. With
`--stall-after A --stall-for B` it begins no answer from A seconds after the first request on, for B seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from aiohttp import web


class Known:
    def __init__(self, stall_after: float, stall_for: float) -> None:
        self._stall = stall_after, stall_for
        self._began: float | None = None
        self.served: list[dict[str, float]] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        received = loop.time()
        self._began = self._began or received
        words = (await request.json())["messages"][-1]["content"].split()
        script = {name: float(value) for name, value in (word.split("=") for word in words)}
        tokens, gap = int(script["tokens"]), script.get("gap", 0.0)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self._pass_stall(loop)
        begin = max(loop.time(), received) + script["first"]
        written: list[float] = []
        for index in range(tokens):
            await asyncio.sleep(max(begin + index * gap - loop.time(), 0))
            written.append(loop.time())
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": "word "}}]}))
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        self.served.append({"first": written[0] - received, "end": loop.time() - received})
        return response

    async def _pass_stall(self, loop: asyncio.AbstractEventLoop) -> None:
        after, duration = self._stall
        assert self._began is not None
        left = self._began + after + duration - loop.time()
        if duration and self._began + after <= loop.time() and left > 0:
            await asyncio.sleep(left)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "known", "object": "model"}]})

    async def information(self, _: web.Request) -> web.Response:
        """What a gateway and SGLang's benchmark ask a server before they send it anything."""
        return web.json_response({"model_path": "known", "served_model_name": "known", "is_generation": True})

    async def log(self, _: web.Request) -> web.Response:
        return web.json_response(self.served)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def serve(known: Known) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", known.chat)
    app.router.add_get("/log", known.log)
    app.router.add_get("/v1/models", known.models)
    for path in ("/health", "/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        app.router.add_get(path, known.information)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stall-after", type=float, default=0.0)
    parser.add_argument("--stall-for", type=float, default=0.0)
    args = parser.parse_args()
    asyncio.run(serve(Known(args.stall_after, args.stall_for)))


if __name__ == "__main__":
    main()
