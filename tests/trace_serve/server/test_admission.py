"""Places in the engine are bounded, handed over in order, and never lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trace_serve.server.admission.admission import Admission
from trace_serve.server.errors import ApiError, unavailable


def admission(**changes: Any) -> Admission:
    options: dict[str, Any] = {"max_in_flight": 1, "max_queue": 2, "max_per_key": None, "queue_timeout_s": 5.0}
    return Admission(**{**options, **changes})


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_handed_over_in_order_of_arrival() -> None:
    gate = admission()
    first = await gate.acquire("a")
    order: list[str] = []

    async def wait(name: str) -> None:
        ticket = await gate.acquire(name)
        order.append(name)
        ticket.release()

    tasks = [asyncio.create_task(wait(name)) for name in ("b", "c")]
    await settle()
    assert (gate.in_flight, gate.queued) == (1, 2)
    first.release()
    await asyncio.gather(*tasks)
    assert order == ["b", "c"]
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_a_full_queue_answers_503_with_retry_after() -> None:
    gate = admission(max_queue=0)
    ticket = await gate.acquire("a")
    with pytest.raises(ApiError) as caught:
        await gate.acquire("b")
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert int(caught.value.headers()["retry-after"]) >= 1
    ticket.release()
    (await gate.acquire("b")).release()


async def test_one_key_cannot_take_all_places() -> None:
    gate = admission(max_in_flight=4, max_per_key=2)
    held = [await gate.acquire("greedy") for _ in range(2)]
    with pytest.raises(ApiError) as caught:
        await gate.acquire("greedy")
    assert caught.value.status == 429
    assert int(caught.value.headers()["retry-after"]) >= 1
    other = await gate.acquire("modest")
    for ticket in (*held, other):
        ticket.release()
    (await gate.acquire("greedy")).release()


async def test_a_place_given_to_a_request_that_gives_up_goes_to_the_next() -> None:
    gate = admission()
    first = await gate.acquire("a")
    second = asyncio.create_task(gate.acquire("b"))
    third = asyncio.create_task(gate.acquire("c"))
    await settle()
    first.release()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    ticket = await asyncio.wait_for(third, 1)
    ticket.release()
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_waiting_too_long_answers_503() -> None:
    gate = admission(queue_timeout_s=0.02)
    ticket = await gate.acquire("a")
    with pytest.raises(ApiError) as caught:
        await gate.acquire("b")
    assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
    assert gate.queued == 0
    ticket.release()
    assert gate.in_flight == 0


async def test_a_stopping_server_turns_the_queue_away() -> None:
    gate = admission()
    ticket = await gate.acquire("a")
    waiting = asyncio.create_task(gate.acquire("b"))
    await settle()
    gate.refuse_waiting(unavailable("stopping", code="stopping", retry_after_s=1))
    with pytest.raises(ApiError, match="stopping"):
        await waiting
    ticket.release()
    ticket.release()
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_a_flood_of_one_key_does_not_starve_another() -> None:
    gate = admission(max_queue=100)
    running = await gate.acquire("flood")
    order: list[str] = []

    async def wait(key: str) -> None:
        ticket = await gate.acquire(key, 10)
        order.append(key)
        ticket.release()

    tasks = [asyncio.create_task(wait("flood")) for _ in range(50)]
    await settle()
    tasks += [asyncio.create_task(wait("modest")) for _ in range(5)]
    await settle()
    running.release()
    await asyncio.gather(*tasks)
    assert order[:10].count("modest") >= 4
    assert len(order) == 55


async def test_a_key_with_little_waiting_displaces_the_flood_from_a_full_queue() -> None:
    gate = admission(max_queue=4)
    running = await gate.acquire("flood")
    flood = [asyncio.create_task(gate.acquire("flood")) for _ in range(4)]
    await settle()
    modest = asyncio.create_task(gate.acquire("modest"))
    await settle()
    with pytest.raises(ApiError) as caught:
        await flood[-1]
    assert (caught.value.status, gate.queued) == (429, 4)
    assert int(caught.value.headers()["retry-after"]) >= 1
    with pytest.raises(ApiError) as caught:
        await gate.acquire("flood")
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    running.release()
    for entered in range(1, 5):
        await settle()
        done = [task for task in (*flood[:3], modest) if task.done()]
        assert len(done) == entered
        for task in done:
            task.result().release()
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_tokens_in_flight_are_bounded_and_counted_again_once_the_prompt_is_known() -> None:
    gate = admission(max_in_flight=10, max_tokens=100)
    first = await gate.acquire("a", 60)
    second = asyncio.create_task(gate.acquire("b", 60))
    await settle()
    assert (gate.in_flight, gate.queued, gate.tokens_in_flight) == (1, 1, 60)
    first.recount(40)
    ticket = await asyncio.wait_for(second, 1)
    assert gate.tokens_in_flight == 100
    ticket.release()
    first.release()
    first.recount(1000)
    assert (gate.in_flight, gate.tokens_in_flight) == (0, 0)


async def test_a_request_over_the_token_budget_runs_alone_and_is_not_passed_over() -> None:
    gate = admission(max_in_flight=10, max_tokens=100, max_queue=10)
    small = await gate.acquire("a", 10)
    large = asyncio.create_task(gate.acquire("b", 1000))
    await settle()
    late = asyncio.create_task(gate.acquire("a", 10))
    await settle()
    assert not late.done()
    small.release()
    held = await asyncio.wait_for(large, 1)
    await settle()
    assert (gate.in_flight, late.done()) == (1, False)
    held.release()
    (await asyncio.wait_for(late, 1)).release()
    assert (gate.in_flight, gate.queued, gate.tokens_in_flight) == (0, 0, 0)


async def test_a_key_may_have_a_limit_of_its_own() -> None:
    gate = admission(max_in_flight=10, max_per_key=1)
    held = [await gate.acquire("wide", concurrent=3) for _ in range(3)]
    with pytest.raises(ApiError, match="3 requests"):
        await gate.acquire("wide", concurrent=3)
    for ticket in held:
        ticket.release()


async def test_requests_that_give_up_leave_nothing_behind() -> None:
    gate = admission(max_queue=1000)
    running = await gate.acquire("a")
    for round_number in range(5):
        tasks = [asyncio.create_task(gate.acquire(f"key-{round_number}-{index}", 5)) for index in range(500)]
        await settle()
        assert gate.queued == 500
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.queued == 0
    assert len(gate._queue._heap) < 200
    running.release()
    assert (gate.in_flight, gate.queued, len(gate._per_key)) == (0, 0, 0)


async def test_ten_thousand_refusals_leave_nothing_behind() -> None:
    gate = admission(max_queue=0)
    ticket = await gate.acquire("a")
    for index in range(10_000):
        with pytest.raises(ApiError):
            await gate.acquire(f"key-{index}")
    ticket.release()
    assert (gate.in_flight, gate.queued, len(gate._per_key)) == (0, 0, 0)
