"""Each key has its requests and tokens a minute, is told what is left, and is charged what it used."""

from __future__ import annotations

from typing import Any

import pytest

from trace_serve.server.admission import rate_limits, rate_windows
from trace_serve.server.admission.cost import estimate_prompt, token_cost
from trace_serve.server.admission.rate_limits import RateLimits
from trace_serve.server.admission.rate_windows import WindowStorage
from trace_serve.server.errors import ApiError
from trace_serve.server.keys.access import Caller
from trace_serve.server.keys.key import KeyLimits
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, parse_request


class Clock:
    """Stands for the time module, at a time of the test's choosing."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rate_limits, "time", clock)
    monkeypatch.setattr(rate_windows, "time", clock)
    return clock


def caller(name: str = "a", **limits: int) -> Caller:
    return Caller(name, KeyLimits(**limits))


def refused(limits: RateLimits, who: Caller, tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limits.reserve(who, tokens)
    return caught.value


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def test_requests_over_the_limit_wait_until_the_window_ends(clock: Clock) -> None:
    limits = RateLimits(2, None)
    limits.reserve(caller(), 1)
    clock.now += 20
    headers = limits.reserve(caller(), 1).headers()
    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "40s",
    }
    error = refused(limits, caller())
    assert (error.status, error.code, error.headers()["retry-after"]) == (429, "rate_limit_exceeded", "40")
    assert error.headers()["x-ratelimit-remaining-requests"] == "0"
    limits.reserve(caller("other"), 1)
    clock.now += 40
    limits.reserve(caller(), 1)


def test_tokens_are_reserved_while_a_request_runs_and_charged_as_used(clock: Clock) -> None:
    limits = RateLimits(None, 100)
    first = limits.reserve(caller(), 60)
    assert first.headers()["x-ratelimit-remaining-tokens"] == "40"
    error = refused(limits, caller(), 50)
    assert error.status == 429
    assert "40 left, 50 wanted" in error.message
    first.settle(usage(5, 5), sent=True)
    first.settle(usage(5, 5), sent=True)
    second = limits.reserve(caller(), 90)
    assert second.headers()["x-ratelimit-remaining-tokens"] == "0"
    second.settle(None, sent=True)
    assert refused(limits, caller(), 1).headers()["retry-after"] == "60"
    clock.now += 61
    assert limits.reserve(caller(), 100).headers()["x-ratelimit-remaining-tokens"] == "0"


def test_a_request_that_never_reached_the_engine_costs_no_tokens(clock: Clock) -> None:
    limits = RateLimits(None, 100)
    limits.reserve(caller(), 100).settle(None, sent=False)
    limits.reserve(caller(), 100)


def test_more_used_than_reserved_is_charged_too(clock: Clock) -> None:
    limits = RateLimits(None, 100)
    limits.reserve(caller(), 10).settle(usage(100, 50), sent=True)
    assert refused(limits, caller()).status == 429


def test_a_refused_request_counts_for_nothing(clock: Clock) -> None:
    limits = RateLimits(2, 100)
    held = limits.reserve(caller(), 90)
    for _ in range(100):
        assert refused(limits, caller(), 50).status == 429
    held.settle(usage(1, 1), sent=True)
    limits.reserve(caller(), 50)


def test_a_request_larger_than_the_limit_is_told_so_and_not_to_wait(clock: Clock) -> None:
    error = refused(RateLimits(None, 100), caller(), 101)
    assert (error.status, error.param, error.code) == (400, "max_tokens", "request_exceeds_limit")
    assert "retry-after" not in error.headers()


def test_a_key_with_limits_of_its_own_overrides_the_servers(clock: Clock) -> None:
    limits = RateLimits(1, 10)
    wide = caller("wide", requests_per_minute=3, tokens_per_minute=1000)
    for _ in range(3):
        limits.reserve(wide, 100)
    assert refused(limits, wide).status == 429
    limits.reserve(caller("plain"), 10)
    assert refused(limits, caller("plain"), 10).status == 429


def test_without_limits_nothing_is_counted_and_no_header_is_sent(clock: Clock) -> None:
    limits = RateLimits(None, None)
    for index in range(1000):
        reservation = limits.reserve(caller(f"key-{index}"), 10**9)
        assert reservation.headers() == {}
        reservation.settle(None, sent=True)
    assert not limits._reserved


def test_counters_of_keys_that_went_away_are_dropped(clock: Clock) -> None:
    storage = WindowStorage()
    for minute in range(10):
        clock.now = 1000.0 + 61 * minute
        for index in range(1000):
            assert storage.incr(f"{minute}-{index}", 60) == 1
    assert len(storage) <= 2000


def chat(*texts: str, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    return parse_request(ChatRequest, {"messages": messages, **fields})


def test_a_prompt_is_estimated_from_its_length_and_exact_for_token_ids() -> None:
    assert estimate_prompt(parse_request(CompletionRequest, {"prompt": [1] * 37})) == 37
    assert estimate_prompt(chat("x" * 400)) == pytest.approx(100, abs=10)
    assert estimate_prompt(chat("龜" * 100, "x" * 100)) == pytest.approx(100, abs=20)


def test_tools_count_as_part_of_the_prompt() -> None:
    function = {"name": "look_up", "description": "x" * 4000, "parameters": {"type": "object", "properties": {}}}
    with_tools = chat("x", tools=[{"type": "function", "function": function}])
    assert estimate_prompt(with_tools) - estimate_prompt(chat("x")) == pytest.approx(1000, abs=100)


@pytest.mark.parametrize(
    ("fields", "cost"),
    [({"max_tokens": 50}, 60), ({"max_tokens": 50, "n": 3}, 160), ({}, 30), ({"max_completion_tokens": 90}, 100)],
)
def test_the_cost_is_the_prompt_and_all_that_may_be_sampled(fields: dict[str, Any], cost: int) -> None:
    assert token_cost(chat("x", **fields), 10, context_length=1000, default_completion=20) == cost


def test_the_cost_never_exceeds_the_context() -> None:
    assert token_cost(chat("x"), 10, context_length=100, default_completion=512) == 100
