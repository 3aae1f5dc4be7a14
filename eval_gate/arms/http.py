"""An arm behind an OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from pydantic import ValidationError

from eval_gate.arms.base import Exchange, unanswered
from eval_gate.arms.evidence import EngineReport
from eval_gate.arms.records import ErrorClass, Failure
from eval_gate.arms.retry import RETRIED, RetryPolicy, classify_status, parse_retry_after
from trace_serve.errors import ConfigError, EngineError

MAX_RESPONSE_BYTES = 16 << 20
_MESSAGE_CHARS = 300


@dataclass(frozen=True)
class Endpoint:
    """Where an arm listens.

    Attributes:
        url: base URL, with or without `/v1`.
        api_key: bearer key; never printed.
        model: served name; None asks `/v1/models`.
        timeout_s: limit of one attempt, from connecting to the last byte.
        concurrency: requests in flight at most.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    timeout_s: float = 120.0
    concurrency: int = 8
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


class HttpArm:
    """Client of one endpoint; an async context manager. A body with `prompt` goes to the completions route.

    Args:
        ask_root: ask the endpoint what it serves even where the model's name is given.
    """

    def __init__(self, endpoint: Endpoint, *, ask_root: bool = False) -> None:
        self._endpoint = endpoint
        self._ask_root = ask_root
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self.model = endpoint.model or ""
        self.root: str | None = None

    async def __aenter__(self) -> Self:
        key = self._endpoint.api_key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=self._endpoint.timeout_s),
            connector=aiohttp.TCPConnector(limit=self._endpoint.concurrency + 1),
        )
        try:
            if not self.model or self._ask_root:
                await self._ask_models()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def report(self) -> EngineReport | None:
        """The engine's `/trace/report`; None when the endpoint has no such route.

        Raises:
            EngineError: the endpoint cannot be reached, or its report is not one.
        """
        status, body = await self._get("/trace/report")
        if status == 404 or status == 405:
            return None
        if status != 200:
            raise EngineError(f"{self._endpoint.root}/trace/report: got HTTP {status}, expected 200 or 404")
        try:
            return EngineReport.model_validate_json(body)
        except ValidationError as exc:
            fault = exc.errors(include_url=False)[0]
            place = ".".join(str(part) for part in fault["loc"])
            raise EngineError(f"{self._endpoint.root}/trace/report: {place}: {fault['msg']}") from exc

    async def complete(self, body: dict[str, Any]) -> Exchange:
        """Sends one request; retries connection faults, 429 and 5xx only. Never raises for a bad answer."""
        async with self._slots:
            attempt = 0
            while True:
                attempt += 1
                exchange, retry_after = await self._attempt(body, attempt)
                failure = exchange.failure
                if failure is None or failure.kind not in RETRIED or attempt >= self._endpoint.retry.attempts:
                    return exchange
                await asyncio.sleep(self._endpoint.retry.delay_s(attempt, retry_after))

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Asks `/tokenize` as SGLang and vLLM have it; None when the endpoint has no such route or refuses."""
        assert self._session is not None
        prompt = {name: body[name] for name in ("messages", "prompt") if name in body}
        async with self._slots:
            for path in ("/tokenize", "/v1/tokenize"):
                try:
                    async with self._session.post(
                        self._endpoint.root + path, json={"model": self.model, **prompt}
                    ) as response:
                        raw = await _read_limited(response)
                        if response.status == 200:
                            return _token_ids(raw)
                except (aiohttp.ClientError, TimeoutError, _AnswerTooLongError):
                    return None
        return None

    async def _attempt(self, body: dict[str, Any], attempt: int) -> tuple[Exchange, float | None]:
        assert self._session is not None
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        started = time.monotonic()
        try:
            async with self._session.post(self._endpoint.root + path, json=body) as response:
                raw = self._without_key(await _read_limited(response))
                latency = time.monotonic() - started
                if response.status != 200:
                    text = raw.decode("utf-8", "replace")
                    message = f"HTTP {response.status}: {text[:_MESSAGE_CHARS]}"
                    failure = Failure(kind=classify_status(response.status), message=message)
                    wait = parse_retry_after(response.headers.get("Retry-After"))
                    return unanswered(failure, attempt, latency, response=text), wait
        except TimeoutError:
            message = f"no complete answer in {self._endpoint.timeout_s:g} s"
            return unanswered(Failure(kind=ErrorClass.TIMEOUT, message=message), attempt, None), None
        except aiohttp.ClientError as exc:
            message = f"{type(exc).__name__}: {exc}"[:_MESSAGE_CHARS]
            return unanswered(Failure(kind=ErrorClass.CONNECTION, message=message), attempt, None), None
        except _AnswerTooLongError as exc:
            return unanswered(Failure(kind=ErrorClass.RESPONSE, message=str(exc)), attempt, None), None
        return _parse(raw, attempt, latency), None

    def _without_key(self, raw: bytes) -> bytes:
        """What a server sends is stored; some repeat the key they refuse."""
        key = self._endpoint.api_key
        return raw.replace(key.encode(), b"[key]") if key else raw

    async def _ask_models(self) -> None:
        status, body = await self._get("/v1/models")
        try:
            entries = [entry for entry in orjson.loads(body)["data"] if isinstance(entry["id"], str)]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            entries = []
        chosen = next((entry for entry in entries if not self.model or entry["id"] == self.model), None)
        if status != 200 or chosen is None:
            wanted = f"one named {self.model!r}" if self.model else "a list; name the model"
            raise ConfigError(
                f"{self._endpoint.root}/v1/models: got HTTP {status} without a model, expected {wanted}", field="model"
            )
        self.model = chosen["id"]
        root = chosen.get("root")
        self.root = root if isinstance(root, str) else None

    async def _get(self, path: str) -> tuple[int, bytes]:
        assert self._session is not None
        try:
            async with self._session.get(self._endpoint.root + path) as response:
                return response.status, await _read_limited(response)
        except (aiohttp.ClientError, TimeoutError, _AnswerTooLongError) as exc:
            raise EngineError(
                f"{self._endpoint.root}{path}: {type(exc).__name__}: {exc}; is the server running?", field="url"
            ) from exc


class _AnswerTooLongError(Exception):
    pass


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise _AnswerTooLongError(f"answer of more than {MAX_RESPONSE_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _token_ids(raw: bytes) -> list[int] | None:
    try:
        tokens = orjson.loads(raw)["tokens"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        return None
    return tokens


def _parse(raw: bytes, attempts: int, latency_s: float) -> Exchange:
    try:
        body = orjson.loads(raw)
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        finish = choice.get("finish_reason")
        usage = body.get("usage") or {}
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as exc:
        message = f"not a completion ({type(exc).__name__}: {exc})"
        shown = raw[:_MESSAGE_CHARS].decode("utf-8", "replace")
        return unanswered(Failure(kind=ErrorClass.RESPONSE, message=message), attempts, latency_s, response=shown)
    # An answer of special tokens only reaches us as null in some servers.
    text = "" if text is None and finish in ("stop", "length") else text
    if not isinstance(text, str) or finish not in ("stop", "length"):
        message = f"got finish_reason {finish!r} and content of type {type(text).__name__}, expected a finished answer"
        return unanswered(Failure(kind=ErrorClass.RESPONSE, message=message), attempts, latency_s, response=body)
    counts = [
        value if isinstance(value, int) and not isinstance(value, bool) else None for value in (prompt, completion)
    ]
    return Exchange(body, text, finish, counts[0], counts[1], latency_s, attempts, None)
