"""What is written down about one sampling request: metrics, a log line, a span, and a record for the gate to replay."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from trace_serve.server.authorization import Authorization
from trace_serve.server.observe.metrics import Metrics
from trace_serve.server.observe.request_log import RequestLog, open_request_log
from trace_serve.server.observe.request_log_record import Exchange, conversation_of
from trace_serve.server.observe.telemetry import Ended, RequestSpan, Telemetry, forwarded, open_telemetry
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.request")

CONVERSATION_HEADER = "x-trace-conversation"
MAX_RESPONSE_BYTES = 8 << 20
"""A longer answer is not kept for the request log; its record counts as too large."""
CLOSE_S = 5.0
_FINISH_REASON = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')


class Asked(Protocol):
    """What an observation reads of a validated request."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def rid(self) -> str | None: ...

    @property
    def user(self) -> str | None: ...


class Observers:
    """Everything that writes requests down; shared by all routes of one application.

    Args:
        settings: which of them are on.
        metrics: counts them in any case.

    Raises:
        ConfigError: the request log or telemetry cannot be set up as asked.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.metrics = metrics
        self.telemetry: Telemetry | None = open_telemetry(settings)
        self.request_log: RequestLog | None = open_request_log(
            settings, lambda result: metrics.request_log.labels(result).inc()
        )

    def request(self, request_id: str, route: str, headers: Mapping[str, str], began: float) -> Observation:
        """Begins to observe a request.

        Args:
            request_id: the minted one.
            route: path of the route.
            headers: of the client's request, names in lower case.
            began: `time.monotonic()` of its arrival.
        """
        return Observation(self, request_id, route, headers, began)

    def close(self) -> None:
        """Writes and sends what waits, for some seconds at most. Blocks."""
        if self.request_log is not None:
            self.request_log.close(CLOSE_S)
        if self.telemetry is not None:
            self.telemetry.close(CLOSE_S)


class Observation:
    """One request, from its arrival to `end`, which is called once whatever becomes of it."""

    def __init__(
        self, observers: Observers, request_id: str, route: str, headers: Mapping[str, str], began: float
    ) -> None:
        self._observers = observers
        self._id = request_id
        self._route = route
        self._headers = headers
        self._began = began
        self._first_s: float | None = None
        self._label = headers.get("x-request-id")
        self._model: str | None = None
        self._policy: Authorization | None = None
        self._body: bytes | None = None
        self._conversation: str | None = None
        self._recorded = False
        self._copy: Callable[[Exchange], None] | None = None
        self._streamed = False
        self._answer = bytearray()
        self._too_large = False
        self._reasons: list[str] = []
        telemetry = observers.telemetry
        self._span: RequestSpan | None = None if telemetry is None else telemetry.request(request_id, route, headers)

    def asked(self, body: bytes, wanted: Asked) -> None:
        """The body has been read and validated."""
        self._label = wanted.rid or self._label
        self._model = wanted.model
        self._streamed = bool(wanted.stream)
        request_log = self._observers.request_log
        if request_log is not None:
            self._conversation = conversation_of(self._headers.get(CONVERSATION_HEADER) or wanted.user)
            self._recorded = request_log.wants(self._id, self._conversation)
            if self._recorded:
                self._body = body
        if self._span is not None and wanted.max_tokens is not None:
            self._span.set("gen_ai.request.max_tokens", wanted.max_tokens)

    def copied(self, body: bytes, copy: Callable[[Exchange], None]) -> None:
        """Has `copy` called with the whole exchange at the end."""
        self._body, self._copy = body, copy

    def served_by(self, policy: Authorization) -> None:
        """A policy has been chosen to answer; the request's model is a name of its own."""
        self._policy = policy
        if self._span is not None:
            self._span.describe(
                self._model or policy.name,
                {
                    "gen_ai.response.model": policy.label,
                    "gen_ai.request.stream": self._streamed,
                    "trace_serve.policy.digest": policy.digest,
                    "trace_serve.verdict.id": policy.verdict_id or "",
                },
            )

    def upstream_headers(self) -> dict[str, str]:
        """Trace headers for the engine: of the span, or the client's own where there is no span."""
        return forwarded(self._headers) if self._span is None else self._span.headers()

    def first_frame(self) -> None:
        """The first frame of a stream has arrived from the engine."""
        self._first_s = time.monotonic() - self._began
        self._observers.metrics.first_frame.labels(self._route).observe(self._first_s)

    def answered(self, content: bytes, answer: Mapping[str, Any]) -> None:
        """A whole answer has arrived from the engine."""
        if self._body is not None:
            self._keep(content)
        if self._span is not None:
            reasons = (each.get("finish_reason") for each in answer.get("choices") or ())
            self._reasons = [str(reason) for reason in reasons if reason is not None]

    def watched(self, stream: Response) -> Response:
        """The same response, with what is sent written down where something here needs it."""
        if self._body is None and self._span is None:
            return stream
        return _Watched(stream, self._sent)

    def end(self, status: int, outcome: str, usage: Mapping[str, Any] | None) -> None:
        """Writes the request down.

        Args:
            status: HTTP status that was sent, 499 when the client had gone.
            outcome: `ok`, `client_gone` or an error code.
            usage: token counts of the engine, if it gave them.
        """
        ended = Ended(status, outcome, time.monotonic() - self._began, self._first_s, usage, tuple(self._reasons))
        self._count(ended)
        self._record(ended)
        trace_id = None
        if self._span is not None:
            trace_id = self._span.trace_id
            self._span.end(ended)
        self._log(ended, trace_id)

    def _sent(self, piece: bytes) -> None:
        if self._body is not None:
            self._keep(piece)
        if self._span is not None and b'"finish_reason"' in piece:
            self._reasons += [reason.decode() for reason in _FINISH_REASON.findall(piece)]

    def _keep(self, piece: bytes) -> None:
        self._too_large = self._too_large or len(self._answer) + len(piece) > MAX_RESPONSE_BYTES
        if self._too_large:
            self._answer.clear()
        else:
            self._answer += piece

    def _count(self, ended: Ended) -> None:
        metrics, usage = self._observers.metrics, ended.usage
        metrics.requests.labels(self._route, str(ended.status), ended.outcome).inc()
        if ended.outcome == "ok":
            metrics.latency.labels(self._route).observe(ended.total_s)
        if usage is None:
            return
        prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
        metrics.prompt_tokens.inc(prompt)
        metrics.completion_tokens.inc(completion)
        if ended.outcome == "ok" and ended.first_s is not None and completion > 1:
            metrics.per_token.labels(self._route).observe((ended.total_s - ended.first_s) / (completion - 1))

    def _record(self, ended: Ended) -> None:
        if self._body is None:
            return
        request_log = self._observers.request_log if self._recorded else None
        if self._too_large:
            if request_log is not None:
                request_log.pass_over()
            return
        exchange = Exchange(
            id=self._id,
            route=self._route,
            status=ended.status,
            outcome=ended.outcome,
            conversation=self._conversation,
            at=time.time(),
            policy=None if self._policy is None else self._policy.label,
            digest=None if self._policy is None else self._policy.digest,
            request=self._body,
            response=bytes(self._answer) if self._answer and ended.outcome == "ok" else None,
            streamed=self._streamed,
        )
        if request_log is not None:
            request_log.submit(exchange)
        if self._copy is not None:
            self._copy(exchange)

    def _log(self, ended: Ended, trace_id: str | None) -> None:
        usage = ended.usage or {}
        log.info(
            "request",
            request_id=self._id,
            label=None if self._label is None else self._label[:256],
            route=self._route,
            policy=None if self._policy is None else self._policy.label,
            status=ended.status,
            outcome=ended.outcome,
            first_frame_s=None if ended.first_s is None else round(ended.first_s, 4),
            total_s=round(ended.total_s, 4),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            **({} if trace_id is None else {"trace_id": trace_id}),
        )


class _Watched(Response):
    """Sends as the inner response does, and shows each piece of the body to a function once it is sent."""

    def __init__(self, inner: Response, saw: Callable[[bytes], None]) -> None:
        self.background = None
        self._inner = inner
        self._saw = saw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and message.get("body"):
                self._saw(message["body"])

        await self._inner(scope, receive, watched)


def _number(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value > 0 else 0
