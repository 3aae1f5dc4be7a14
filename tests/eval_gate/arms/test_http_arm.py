"""The HTTP arm against a real server: what is retried, what is not, and how each failure is classed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from eval_gate.arms.base import Exchange
from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.arms.records import ErrorClass
from eval_gate.arms.retry import RetryPolicy, parse_retry_after
from trace_serve.errors import EngineError

QUICK = RetryPolicy(attempts=3, first_delay_s=0.01, longest_delay_s=0.05)


def body(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}


async def ask(url: str, *prompts: str, timeout_s: float = 5.0, concurrency: int = 4) -> list[Exchange]:
    endpoint = Endpoint(url, timeout_s=timeout_s, concurrency=concurrency, retry=QUICK)
    async with HttpArm(endpoint) as arm:
        return list(await asyncio.gather(*(arm.complete(body(prompt)) for prompt in prompts)))


@pytest.mark.parametrize("fault", [429, 500, 503, "disconnect"])
async def test_passing_faults_are_retried(start_server: Callable[[], Any], fault: int | str) -> None:
    server = start_server()
    server.faults["hello"] = [fault, fault]
    (exchange,) = await ask(server.url, "hello")
    assert (exchange.text, exchange.attempts, exchange.failure) == ("hello", 3, None)


@pytest.mark.parametrize(
    ("fault", "kind", "attempts"),
    [
        (429, ErrorClass.RATE_LIMITED, 3),
        (502, ErrorClass.SERVER, 3),
        ("disconnect", ErrorClass.CONNECTION, 3),
        (400, ErrorClass.REQUEST, 1),
        ("garbage", ErrorClass.RESPONSE, 1),
    ],
)
async def test_lasting_faults_end_in_their_own_class(
    start_server: Callable[[], Any], fault: int | str, kind: ErrorClass, attempts: int
) -> None:
    server = start_server()
    server.faults["hello"] = [fault] * 10
    (exchange,) = await ask(server.url, "hello")
    assert exchange.failure is not None
    assert (exchange.failure.kind, exchange.attempts, exchange.text) == (kind, attempts, None)
    assert server.prompts.count("hello") == attempts


async def test_a_hanging_request_times_out_once_and_its_neighbours_do_not(start_server: Callable[[], Any]) -> None:
    server = start_server()
    server.faults["slow"] = ["hang"] * 10
    slow, fast = await ask(server.url, "slow", "fast", timeout_s=0.5)
    assert slow.failure is not None
    assert (slow.failure.kind, slow.attempts) == (ErrorClass.TIMEOUT, 1)
    assert fast.text == "fast"


async def test_concurrency_is_limited(start_server: Callable[[], Any]) -> None:
    server = start_server()
    server.delay_s = 0.02
    await ask(server.url, *(f"q{i}" for i in range(20)), concurrency=3)
    assert server.most_in_flight == 3


async def test_the_key_is_sent_and_the_served_name_is_asked_for(start_server: Callable[[], Any]) -> None:
    server = start_server()
    endpoint = Endpoint(server.url + "/v1/", api_key="secret")
    assert "secret" not in repr(endpoint)
    async with HttpArm(endpoint) as arm:
        await arm.complete(body("hello"))
        assert arm.model == "same-name"
    assert server.authorizations == ["Bearer secret"]


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]},
        {"choices": [{"message": {"content": "x"}, "finish_reason": None}]},
        {"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]},
        {"error": {"message": "in a 200"}},
    ],
)
async def test_an_answer_that_did_not_finish_is_not_a_wrong_answer(
    start_server: Callable[[], Any], answer: dict[str, Any]
) -> None:
    server = start_server()
    server.answer = lambda prompt: answer
    (exchange,) = await ask(server.url, "hello")
    assert exchange.failure is not None
    assert exchange.failure.kind is ErrorClass.RESPONSE


async def test_nothing_listening_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match=r"127.0.0.1:9/v1/models: .*is the server running"):
        await ask("http://127.0.0.1:9", "hello")


async def test_a_report_is_read_or_absent_or_refused(
    start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]]
) -> None:
    server = start_server()
    async with HttpArm(Endpoint(server.url)) as arm:
        assert await arm.report() is None
        server.report = engine_report("fp4")
        report = await arm.report()
        assert report is not None
        assert report.experts.layers_quantized == 30
        server.report = {"mode": "fp4"}
        with pytest.raises(EngineError, match="schema_version"):
            await arm.report()


def test_back_off_grows_and_honours_retry_after() -> None:
    policy = RetryPolicy(first_delay_s=1.0, longest_delay_s=30.0)
    assert 0.75 <= policy.delay_s(1, None) <= 1.25
    assert 3.0 <= policy.delay_s(3, None) <= 5.0
    assert policy.delay_s(1, 7.0) == 7.0
    assert policy.delay_s(1, 3600.0) == 30.0
    assert parse_retry_after("5") == 5.0
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") is None
    assert parse_retry_after("soon") is parse_retry_after("") is parse_retry_after(None) is None
    later = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True))
    assert later is not None
    assert 55 < later <= 60
