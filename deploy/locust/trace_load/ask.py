"""One request, from the send to its place in the totals."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import gevent
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, FastHttpSession

from trace_load.session import Session
from trace_serve.load.clients import client_of
from trace_serve.load.exchange import Client, Exchange, Labels, Outcome
from trace_serve.load.stream import StreamFailedError, StreamTimes, read_stream

HEADERS = ("x-trace-policy", "x-trace-policy-digest", "x-trace-weight-version", "x-trace-verdict")
ROLLOUT = "x-trace-rollout"
SLOW_BUFFER_BYTES = 4096


class Leave(BaseException):
    """The client goes away; no Exception, so that no layer between mistakes it for a failure of the server."""


class Asked:
    """What is known so far about the request that is under way."""

    def __init__(self) -> None:
        self.labels = Labels()
        self.rollout = ""
        self.answer: Any = None


def ask(session: Session, http: FastHttpSession, index: int, due_s: float | None) -> None:
    """Sends arrival `index` and records what becomes of it.

    Args:
        due_s: when it was due, since the run began; None in a closed loop.
    """
    client = client_of(session.plan, index)
    request = session.workload.request(index)
    sent_s = session.now
    known: dict[str, Any] = {"index": index, "client": client, "sent_s": sent_s}
    known["scheduled_s"] = sent_s if due_s is None else due_s
    asked = Asked()
    try:
        with gevent.Timeout(_patience(session, client, index), Leave):
            times = _exchange(session, http, request.route, request.body, client, asked)
        done: dict[str, Any] = {
            "outcome": Outcome.OK,
            "first_s": times.first,
            "end_s": times.end,
            "gaps_s": times.gaps,
            "prompt_tokens": times.prompt_tokens,
            "completion_tokens": times.completion_tokens,
        }
    except Leave:
        done = {"outcome": Outcome.LEFT, "end_s": session.now}
    except gevent.GreenletExit:
        done = {"outcome": Outcome.UNFINISHED, "reason": "no end of the answer within the drain"}
    except RefusedError as exc:
        done = {"outcome": Outcome.REFUSED, "end_s": session.now, "reason": str(exc)}
    except (StreamFailedError, *FAILURE_EXCEPTIONS) as exc:
        done = {"outcome": Outcome.FAILED, "end_s": session.now, "reason": str(exc) or type(exc).__name__}
    finally:
        if asked.answer is not None:
            asked.answer.release()
    if done["outcome"] is Outcome.OK and session.plan.hints == "fetch":
        done |= _fetch_hints(session, http, asked.rollout)
    exchange = Exchange(**known, **done, labels=asked.labels)
    session.totals.add(exchange)
    _fire(session, exchange)


class RefusedError(Exception):
    """429 or 503: the server says that it has no room."""


def _exchange(
    session: Session, http: FastHttpSession, route: str, body: dict[str, Any], client: Client, asked: Asked
) -> StreamTimes:
    answer = http.post(route, json=body, headers=_headers(session), stream=True, catch_response=True)
    if answer.status_code == 0:
        raise StreamFailedError(str(getattr(answer, "error", None) or "no connection"))
    asked.answer = answer
    asked.labels = Labels(*(str(answer.headers.get(name) or "") for name in HEADERS))
    asked.rollout = str(answer.headers.get(ROLLOUT) or "")
    if answer.status_code != 200:
        error = RefusedError if answer.status_code in (429, 503) else StreamFailedError
        raise error(f"status {answer.status_code}: {_reason(answer)}")
    pace = session.plan.slow_bytes_per_s if client is Client.SLOW else 0
    return read_stream(_lines(answer, pace), lambda: session.now)


def _lines(answer: Any, pace: int) -> Iterator[bytes]:
    """Lines as they come, or no faster than `pace` bytes a second, so that the server's buffers fill."""
    stream = answer.stream
    if pace and stream._sock is not None:
        stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        stream.block_size = 256
    while line := stream.readline(b"\n"):
        yield bytes(line)
        if pace:
            gevent.sleep(len(line) / pace)


def _patience(session: Session, client: Client, index: int) -> float | None:
    """Seconds until a client leaves, between nothing and twice the plan's time; None for those that stay."""
    if client is not Client.LEAVES:
        return None
    return random.Random(f"{session.plan.seed}/{index}").uniform(0, 2 * session.plan.disconnect_after)


def _fetch_hints(session: Session, http: FastHttpSession, rollout: str) -> dict[str, Any]:
    if not rollout:
        return {"hint_fault": "the answer named no rollout"}
    began = time.perf_counter()
    answer = http.get(f"/v1/rollouts/{rollout}/hints", headers=_headers(session), catch_response=True)
    if answer.status_code != 200:
        return {"hint_fault": f"status {answer.status_code}: {_reason(answer)}".replace(rollout, "ID")}
    return {"hint_s": time.perf_counter() - began, "hint_bytes": len(answer.content)}


def _headers(session: Session) -> dict[str, str]:
    key = session.environment.parsed_options.api_key
    return {"authorization": f"Bearer {key}"} if key else {}


def _reason(answer: Any) -> str:
    if answer.status_code == 0:
        return str(getattr(answer, "error", None) or "no connection")
    text = answer.text or ""
    try:
        body = json.loads(text)
        return str(body.get("error", body)["message"])[:200]  # SGLang alone gives the inner object
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(text)[:200]


def _fire(session: Session, exchange: Exchange) -> None:
    """Shows the request in locust's own statistics: E2E, TTFT, TPOT, ITL and tokens/s, from the actual send."""
    failed = exchange.outcome not in (Outcome.OK, Outcome.LEFT)
    kind = "LEFT" if exchange.outcome is Outcome.LEFT else "E2E"
    end_s = session.now if exchange.end_s is None else exchange.end_s
    total_s = max(end_s - (exchange.sent_s or 0.0), 1e-6)
    fault = StreamFailedError(exchange.reason) if failed else None
    figures = {kind: total_s * 1000}
    if exchange.outcome is Outcome.OK and exchange.client is Client.PLAIN:
        figures["TTFT"] = (exchange.latency("ttft_sent") or 0.0) * 1000
        if exchange.tpot_s is not None:
            figures["TPOT"] = exchange.tpot_s * 1000
        if exchange.gaps_s:
            figures["ITL"] = sum(exchange.gaps_s) / len(exchange.gaps_s) * 1000
        figures["tokens/s"] = exchange.completion_tokens / total_s
    for name, value in figures.items():
        session.environment.events.request.fire(
            request_type=name,
            name=session.plan.workload,
            response_time=value,
            response_length=0,
            exception=fault,
            context={},
        )
