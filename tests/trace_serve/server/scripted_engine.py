"""An OpenAI-style upstream in a process of its own, for transport behaviour that a real engine shows only by chance.

It samples nothing: the last message (or the prompt) is a script of `key=value` words, for example
`tokens=20 delay=0.05 die_after=3`, and the server behaves accordingly. It records what it received.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import scripted_shapes as shapes
from aiohttp import web

from trace_serve.policy.digest import digest_directory

CONTEXT_LENGTH = 512
VOCAB_SIZE = 300
SERVED_NAME = "scripted-model"
TRACE_HEADERS = ("traceparent", "tracestate")
METRICS = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="scripted-model",tp_rank="0"} 3.0
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="scripted-model"} 17.0
# HELP trace_serve_ready A name that is not the engine's to give.
# TYPE trace_serve_ready gauge
trace_serve_ready 0.0
"""
TEXT = "안녕 🫠🥹龜 ok "


class Script:
    """One request's instructions."""

    def __init__(self, text: str) -> None:
        self.words = dict(word.split("=", 1) for word in text.split() if "=" in word)
        self.tokens = int(self.words.get("tokens", 4))
        self.delay = float(self.words.get("delay", 0.0))

    def at(self, name: str, index: int) -> bool:
        return self.words.get(name) == str(index)

    def has(self, name: str) -> bool:
        return name in self.words


class Upstream:
    def __init__(self, key: str, report: dict[str, Any]) -> None:
        self.key = key
        self.report = report
        self.seen: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.running = 0
        self.health_asked = 0
        self.alive = True
        self.quarantined = False
        self.age_s = 0.1
        self.heartbeat_delay = 0.0
        self.refusal: str | None = None
        self.update_delay = 0.0
        self.quarantined_by_update = False
        self.weight_version = "default"
        self.tokenizer_held = False
        self.metrics = METRICS
        self.metrics_times = 1
        self.metrics_delay = 0.0
        self.trace_headers: dict[str, str] = {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.authenticate])
        if self.report:
            app.router.add_get("/trace/heartbeat", self.heartbeat)
            app.router.add_get("/trace/report", self.get_report)
        app.router.add_get("/health", self.healthy)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/metrics", self.get_metrics)
        app.router.add_get("/script/seen", self.get_seen)
        app.router.add_post("/script/health", self.set_health)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/tokenize", self.tokenize)
        return app

    @web.middleware
    async def authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        open_to_all = request.path == "/health"  # as in SGLang
        if not open_to_all and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "bad engine key"}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def heartbeat(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.heartbeat_delay)
        beat = {"age_s": self.age_s, "limit_s": 20.0, "alive": self.alive, "quarantined": self.quarantined}
        beat |= {"weight_version": self.weight_version, "policy_digest": self.report.get("policy_digest")}
        return web.json_response(beat)

    async def healthy(self, _: web.Request) -> web.Response:
        self.health_asked += 1
        return web.json_response({})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": SERVED_NAME, "object": "model", "max_model_len": CONTEXT_LENGTH}
        return web.json_response({"object": "list", "data": [card]})

    async def get_report(self, _: web.Request) -> web.Response:
        return web.json_response(self.report)

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def get_metrics(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.metrics_delay)
        return web.Response(text=self.metrics * self.metrics_times)

    async def get_seen(self, _: web.Request) -> web.Response:
        seen = {"seen": self.seen, "aborted": self.aborted, "running": self.running, "health_asked": self.health_asked}
        return web.json_response({**seen, "trace_headers": self.trace_headers})

    async def set_health(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        self.alive = wanted.get("alive", self.alive)
        self.quarantined = wanted.get("quarantined", self.quarantined)
        self.age_s = wanted.get("age_s", self.age_s)
        self.refusal = wanted.get("refusal", self.refusal)
        self.update_delay = wanted.get("update_delay", self.update_delay)
        self.quarantined_by_update = wanted.get("quarantined_by_update", self.quarantined_by_update)
        self.heartbeat_delay = wanted.get("heartbeat_delay", self.heartbeat_delay)
        self.weight_version = wanted.get("weight_version", self.weight_version)
        self.tokenizer_held = wanted.get("tokenizer_held", self.tokenizer_held)
        self.metrics = wanted.get("metrics", self.metrics)
        self.metrics_times = wanted.get("metrics_times", self.metrics_times)
        self.metrics_delay = wanted.get("metrics_delay", self.metrics_delay)
        self.report.update(wanted.get("report", {}))
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        """Takes a policy directory as its weights, unless a file in it says how that goes wrong."""
        body = await request.json()
        directory = Path(body["model_path"])
        if self.refusal is not None:
            return web.json_response({"success": False, "message": self.refusal}, status=400)
        await asyncio.sleep(self.update_delay)
        self.report["policy_digest"] = digest_directory(directory)
        self.weight_version = body.get("weight_version")
        if self.quarantined_by_update:
            self.quarantined, self.report["policy_digest"] = True, None
            return web.json_response({"success": False, "message": "weights of two versions"}, status=400)
        return web.json_response({"success": True, "message": "loaded"})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.trace_headers = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        self.seen.append(payload)
        self.seen = self.seen[-50:]
        text = payload["messages"][-1].get("content") or "" if "messages" in payload else str(payload["prompt"])
        script = Script(text)
        self.running += 1
        try:
            if script.has("hang"):
                await asyncio.sleep(3600)
            if script.has("status"):
                body = {"object": "error", "message": script.words.get("message", "scripted"), "code": 1}
                return web.json_response(body, status=int(script.words["status"]))
            if payload.get("stream"):
                return await self.stream(request, payload, script)
            return await self.whole(payload, script)
        finally:
            self.running -= 1

    async def tokenize(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.seen = [*self.seen, payload][-50:]
        text = shapes.prompt_text(payload)
        while self.tokenizer_held:
            await asyncio.sleep(0.02)
        tokens = shapes.token_ids(text)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": -1})

    async def whole(self, payload: dict[str, Any], script: Script) -> web.Response:
        for index in range(script.tokens):
            await asyncio.sleep(script.delay)
            if script.at("die_after", index):
                os._exit(9)
        reason = "abort" if script.has("abort") else "stop"
        content = TEXT * script.tokens
        call = shapes.tool_call(payload, script.words.get("arguments", "{}"))
        if script.has("moves"):
            self.weight_version = script.words["moves"]
        answer = {
            "id": payload.get("rid", "scripted"),
            "object": "chat.completion" if "messages" in payload else "text_completion",
            "created": 1,
            "model": SERVED_NAME,
            "weights": self.report.get("policy_digest"),
            "choices": shapes.choices(payload, content, reason, call),
            "usage": usage(script),
            "metadata": shapes.metadata(payload, content, self.weight_version),
        }
        text = json.dumps(answer)
        if script.has("nan"):
            text = text.replace('"index": 0', '"index": 0, "logprob": NaN, "other": -Infinity')
        return web.Response(text=text, content_type="application/json")

    async def stream(self, request: web.Request, payload: dict[str, Any], script: Script) -> web.StreamResponse:
        if script.has("moves"):
            self.weight_version = script.words["moves"]
        version = {"x-trace-weight-version": quote(self.weight_version)}
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **version})
        await response.prepare(request)

        async def write(data: bytes) -> None:
            pieces = [data[i : i + 1] for i in range(len(data))] if script.has("bytewise") else [data]
            for piece in pieces:
                await response.write(piece)
                await asyncio.sleep(0)

        async def send(chunk: dict[str, Any]) -> None:
            text = json.dumps(chunk, ensure_ascii=False)
            if script.has("nan"):
                text = text.replace('"index": 0', '"index": 0, "logprob": NaN')
            await write(b"data: " + text.encode() + b"\n\n")

        kind = "chat.completion.chunk" if "messages" in payload else "text_completion"
        head = {"id": payload.get("rid", "scripted"), "object": kind, "created": 1, "model": SERVED_NAME}
        call = shapes.tool_call(payload, script.words.get("arguments", "{}"))
        for index in range(script.tokens):
            await asyncio.sleep(script.delay)
            if script.at("die_after", index):
                os._exit(9)
            if script.at("cut_after", index) and request.transport is not None:
                request.transport.close()
                return response
            if script.at("error_after", index):
                await send({"error": {"object": "error", "message": "scripted failure", "code": 500}})
                await write(b"data: [DONE]\n\n")
                return response
            if script.at("garbage_after", index):
                await write(b"data: {error\n\n")
            if script.at("abort_after", index):
                await send({**head, "choices": shapes.delta(payload, None, "abort")})
                await write(b"data: [DONE]\n\n")
                return response
            head["weights"] = self.report.get("policy_digest")
            await send({**head, "choices": shapes.delta(payload, TEXT, None, call)})
        await send({**head, "choices": shapes.delta(payload, None, "stop" if call is None else "tool_calls")})
        if (payload.get("stream_options") or {}).get("include_usage"):
            await send({**head, "choices": [], "usage": usage(script)})
        if (payload.get("custom_params") or {}).get("trace_rollout"):
            content = TEXT * script.tokens
            await send({**head, "choices": [], "metadata": shapes.metadata(payload, content, self.weight_version)})
        await write(b"data: [DONE]\n\n")
        return response


def usage(script: Script) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": script.tokens, "total_tokens": 7 + script.tokens}


async def leave_with_parent(app: web.Application) -> AsyncIterator[None]:
    """Ends the process once whoever started it is gone, as the real engine does."""
    parent = os.getppid()

    async def watch() -> None:
        while os.getppid() == parent:
            await asyncio.sleep(1.0)
        os._exit(0)

    task = asyncio.create_task(watch())
    yield
    task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--report", required=True, help="JSON; {} is a server that has no /trace routes")
    args = parser.parse_args()
    app = Upstream(args.key, json.loads(args.report)).app()
    app.cleanup_ctx.append(leave_with_parent)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
