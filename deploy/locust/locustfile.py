"""Load test of a running server: streams chat requests and reports TTFT, TPOT, end-to-end latency and tokens/s.

    locust -f deploy/locust/locustfile.py --host http://127.0.0.1:8080 --headless -u 4 -t 30s

Closed loop: every user waits for its answer before it asks again. Each finished request adds one value to the rows E2E
(arrival of the last byte), TTFT (first text), TPOT ((E2E - TTFT) / (tokens - 1)) and tokens/s (completion tokens over
E2E of one request; locust prints every figure as if it were milliseconds). Token counts come from the usage chunk. An
error event, a status other than 200, or a stream without usage or [DONE] is a failed E2E and is in no other row.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locust import FastHttpUser, constant, events, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.exception import StopUser
from locust.runners import WorkerRunner

ROUTE = "/v1/chat/completions"
NAME = "chat"


class StreamFailedError(Exception):
    """The answer did not end as a successful stream ends."""


@dataclass
class Tokens:
    """Token counts since the test began; workers report what they added since their last report."""

    prompt: int = 0
    completion: int = 0
    unreported: int = 0
    unreported_prompt: int = 0
    began: float = 0.0

    def add(self, prompt: int, completion: int) -> None:
        self.prompt += prompt
        self.completion += completion
        self.unreported_prompt += prompt
        self.unreported += completion


TOKENS = Tokens()
QUERIES: Iterator[dict[str, Any]] = iter(())


def load_queries(path: Path) -> list[dict[str, Any]]:
    """The `messages` (or `prompt`) and `max_tokens` of every record of a gate query file.

    Raises:
        ValueError: a line is not such a record; it is named.
    """
    queries = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
        except (ValueError, KeyError, AttributeError) as exc:
            raise ValueError(f"{path}:{number}: not a record with messages or prompt") from exc
        queries.append({"messages": messages, "max_tokens": record.get("max_tokens", 64)})
    if not queries:
        raise ValueError(f"{path}: no queries in it")
    return queries


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--api-key", env_var="TRACE_SERVE_API_KEY", default="", is_secret=True, help="bearer key")
    parser.add_argument("--model", env_var="TRACE_SERVE_MODEL", default="", help="model name to send; default none")
    parser.add_argument("--queries", default="support", help="a shipped suite's name, or a JSONL file")
    parser.add_argument("--max-tokens", type=int, default=0, help="instead of each query's own limit")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--order-seed", type=int, default=0, help="seed of the order of the queries")


@events.test_start.add_listener
def read_queries(environment: Any, **_: Any) -> None:
    global QUERIES
    options = environment.parsed_options
    path = Path(options.queries)
    if not path.suffix:
        from eval_gate import suites

        path = suites.path(options.queries)
    queries = load_queries(path)
    random.Random(options.order_seed).shuffle(queries)
    QUERIES = itertools.cycle(queries)
    TOKENS.began = time.time()


class ChatUser(FastHttpUser):
    """One client that streams one answer after the other."""

    host = "http://127.0.0.1:8080"
    wait_time = constant(0)
    network_timeout = 600.0
    connection_timeout = 10.0

    @task
    def chat(self) -> None:
        options = self.environment.parsed_options
        query = next(QUERIES, None)
        if query is None:
            raise StopUser
        payload = {
            **query,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": options.temperature,
        }
        if options.max_tokens:
            payload["max_tokens"] = options.max_tokens
        if options.model:
            payload["model"] = options.model
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        began = time.perf_counter()
        with self.client.post(
            ROUTE, name=NAME, json=payload, headers=headers, stream=True, catch_response=True
        ) as answer:
            answer.request_meta["request_type"] = "E2E"
            try:
                if answer.status_code != 200:
                    raise StreamFailedError(f"status {answer.status_code}: {_reason(answer)}")
                first_s, usage = read_stream(answer.stream, began)
            except (StreamFailedError, *FAILURE_EXCEPTIONS) as exc:
                answer.request_meta["response_time"] = (time.perf_counter() - began) * 1000
                answer.failure(str(exc) or type(exc).__name__)
                return
            total_s = time.perf_counter() - began
            answer.request_meta["response_time"] = total_s * 1000
            answer.success()
        self.report(first_s, total_s, usage)

    def report(self, first_s: float, total_s: float, usage: dict[str, int]) -> None:
        tokens = usage["completion_tokens"]
        TOKENS.add(usage["prompt_tokens"], tokens)
        self.fire("TTFT", first_s * 1000)
        if tokens > 1:
            self.fire("TPOT", (total_s - first_s) / (tokens - 1) * 1000)
        self.fire("tokens/s", tokens / total_s)

    def fire(self, kind: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=NAME, response_time=value, response_length=0, exception=None, context={}
        )


def read_stream(stream: Any, began: float) -> tuple[float, dict[str, int]]:
    """Reads server-sent events to the end.

    Args:
        stream: has `readline(sep)`, which returns b"" at the end.
        began: `time.perf_counter()` when the request was sent.

    Returns:
        Seconds until the first text (or the first event, if there was no text), and the usage.

    Raises:
        StreamFailedError: an error event, or no usage or no [DONE].
    """
    first_s: float | None = None
    first_event_s: float | None = None
    usage: dict[str, int] | None = None
    done = False
    while line := stream.readline(b"\n"):
        data = bytes(line).strip().removeprefix(b"data:").strip()
        if not data:
            continue
        if first_event_s is None:
            first_event_s = time.perf_counter() - began
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError as exc:
            raise StreamFailedError(f"an event is not JSON: {data[:80]!r}") from exc
        if event.get("error"):
            raise StreamFailedError(f"error event: {event['error'].get('message', event['error'])}")
        if event.get("usage"):
            usage = event["usage"]
        if first_s is None and any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
            first_s = time.perf_counter() - began
    if not done:
        raise StreamFailedError("the stream ended without [DONE]")
    if usage is None or first_event_s is None:
        raise StreamFailedError("the stream had no usage chunk")
    return first_s if first_s is not None else first_event_s, usage


def _reason(answer: Any) -> str:
    if answer.status_code == 0:
        return str(getattr(answer, "error", None) or "no connection")
    text = answer.text or ""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


@events.report_to_master.add_listener
def send_tokens(client_id: str, data: dict[str, Any]) -> None:
    data["tokens"] = [TOKENS.unreported_prompt, TOKENS.unreported]
    TOKENS.unreported_prompt = TOKENS.unreported = 0


@events.worker_report.add_listener
def receive_tokens(client_id: str, data: dict[str, Any]) -> None:
    TOKENS.add(*data.get("tokens", [0, 0]))


@events.quitting.add_listener
def print_summary(environment: Any, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    entries = environment.stats.entries
    ended = entries.get((NAME, "E2E"))
    if ended is None or ended.num_requests == 0:
        return
    seconds = max((ended.last_request_timestamp or 0.0) - TOKENS.began, 1e-9)
    lines = [f"trace-serve load test: {ended.num_requests - ended.num_failures} answered, {ended.num_failures} failed"]
    for kind in ("TTFT", "TPOT", "E2E"):
        entry = entries.get((NAME, kind))
        if entry is not None:
            quantiles = [entry.get_response_time_percentile(share) for share in (0.5, 0.95, 0.99)]
            shown = "  ".join(f"p{p} {value:.0f}" for p, value in zip((50, 95, 99), quantiles, strict=True))
            lines.append(f"  {kind:5} ms  mean {entry.avg_response_time:.1f}  {shown}")
    rates = f"{TOKENS.completion / seconds:.1f} completion, {TOKENS.prompt / seconds:.1f} prompt"
    lines.append(f"  tokens/s  {rates}  ({TOKENS.completion} completion tokens in {seconds:.1f} s)")
    logging.getLogger("locust.stats_logger").info("\n".join(["", *lines, ""]))
