"""A small real HTTP server that speaks chat completions, and builders of results."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from eval_gate.arms.evidence import ArmEvidence, EngineReport
from eval_gate.arms.records import Role, SampleRecord
from eval_gate.decide import decide
from eval_gate.pairing import ArmResults
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet
from eval_gate.verdict import Verdict
from trace_serve.recipe import Recipe

DIGEST_A = "sha256:" + "a" * 64
DIGEST_B = "sha256:" + "b" * 64


class ChatServer:
    """Serves on loopback from its own thread.

    Attributes:
        answer: last user message -> text, or a whole response body.
        faults: last user message -> faults that the next requests meet, one each: an HTTP status, "hang", "disconnect"
            or "garbage".
        report: body of `/trace/report`; None answers 404.
        models: entries of `/v1/models`.
        tokens: messages or prompt -> token ids of `/tokenize`; None answers 404.
    """

    def __init__(self) -> None:
        self.answer: Callable[[str], str | dict[str, Any]] = lambda prompt: prompt
        self.faults: dict[str, list[int | str]] = defaultdict(list)
        self.headers: dict[str, str] = {}
        self.report: dict[str, Any] | None = None
        self.models: list[dict[str, Any]] = [{"id": "same-name"}]
        self.tokens: Callable[[Any], list[int]] | None = None
        self.finish_reason = "stop"
        self.extra_prompt_tokens = 0
        self.prompts: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = ""

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/trace/report", self._report)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": self.models})

    async def _report(self, request: web.Request) -> web.Response:
        return web.json_response(self.report, status=404 if self.report is None else 200)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.tokens is None:
            return web.json_response({}, status=404)
        ids = self.tokens(body["messages"] if "messages" in body else body["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 2048})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._reply(request)
        finally:
            self.in_flight -= 1

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        self.prompts.append(prompt)
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("Authorization"))
        await asyncio.sleep(self.delay_s)
        if self.faults[prompt]:
            fault = self.faults[prompt].pop(0)
            if isinstance(fault, int):
                return web.json_response({"error": {"message": "no"}}, status=fault, headers=self.headers)
            if fault == "disconnect":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if fault == "hang":
                await asyncio.sleep(30)
            return web.Response(text="<html>not json", content_type="application/json")
        answer = self.answer(prompt)
        if isinstance(answer, dict):
            return web.json_response(answer)
        return web.json_response(
            {
                "choices": [
                    ({"message": {"content": answer}} if "messages" in body else {"text": answer})
                    | {"finish_reason": self.finish_reason}
                ],
                "usage": {
                    "prompt_tokens": len(prompt) + self.extra_prompt_tokens,
                    "completion_tokens": max(1, len(answer)),
                },
            }
        )


@pytest.fixture
def start_server() -> Iterator[Callable[[], ChatServer]]:
    servers: list[ChatServer] = []

    def start() -> ChatServer:
        server = ChatServer()
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def engine_report() -> Callable[..., dict[str, Any]]:
    """Builds what `/trace/report` says of a 30-layer engine, BF16 or under the default recipe."""

    def build(mode: str, **changes: Any) -> dict[str, Any]:
        fp4 = mode == "fp4"
        recipe = Recipe() if fp4 else Recipe(experts="bf16", kv="bf16")
        layers = {"format": "nvfp4" if fp4 else "bf16", "layers_quantized": 30 if fp4 else 0, "layers_total": 30}
        report = {
            "schema_version": 1,
            "mode": mode,
            "recipe_id": recipe.recipe_id,
            "recipe": recipe.to_dict(),
            "policy_digest": DIGEST_B if fp4 else DIGEST_A,
            "tokenizer_digest": "sha256:" + "1" * 64,
            "chat_template_digest": "sha256:" + "2" * 64,
            "experts": {**layers, "backend": "reference"},
            "kv": {**layers, "bytes_per_token": 3240},
            "context_length": 2048,
            "vocab_size": 49152,
            "sglang": "0.5.23",
        }
        return report | changes

    return build


@pytest.fixture
def make_verdict(engine_report: Callable[..., dict[str, Any]]) -> Callable[..., Verdict]:
    """Builds a verdict over `match` equal pairs and `lost` lost ones; words are the tokens, where there are tokens."""

    def build(
        match: int = 200,
        lost: int = 1,
        serving_digest: str | None = DIGEST_B,
        answer: str = "no",
        prompt: str = "2 + 2?",
        tokens: bool = False,
        **policy: Any,
    ) -> Verdict:
        queries, samples = [], []
        for number in range(match + lost):
            raw = {
                "id": f"q{number}",
                "kind": "sums",
                "prompt": prompt,
                "checker": {"type": "exact", "expected": "yes"},
            }
            queries.append(Query.model_validate(raw))
            for role, right in ((Role.TRAINING, True), (Role.SERVING, number < match)):
                text = "yes" if right else answer
                entries = [{"token": word, "logprob": -0.5} for word in text.split(" ")]
                samples.append(
                    SampleRecord(
                        key=f"{role}{number}",
                        query_id=f"q{number}",
                        role=role,
                        sample=0,
                        request={},
                        response={"choices": [{"logprobs": {"content": entries}}]} if tokens else None,
                        text=text,
                        finish_reason="stop",
                        passed=right,
                        attempts=1,
                    )
                )
        training = ArmEvidence(
            source="/models/base",
            artifact_digest=DIGEST_A,
            base_digest=DIGEST_A,
            report=EngineReport.model_validate(engine_report("bf16")),
        )
        serving = ArmEvidence(
            source="/models/demo",
            artifact_digest=serving_digest,
            base_digest=DIGEST_A,
            recipe_id=Recipe().recipe_id,
            policy_name="demo",
            policy_version="1",
            report=EngineReport.model_validate(engine_report("fp4")),
        )
        return decide(
            GatePolicy(**policy),
            QuerySet(tuple(queries), "sha256:" + "c" * 64, "q.jsonl"),
            ArmResults(training, samples),
            ArmResults(serving, samples),
            results_digest="sha256:" + "d" * 64,
        )

    return build


@pytest.fixture
def verdict(make_verdict: Callable[..., Verdict]) -> Verdict:
    """A PASS for policy `demo` version 1."""
    return make_verdict()
