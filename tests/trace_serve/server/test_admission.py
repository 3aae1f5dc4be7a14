"""Places in the engine are bounded, handed over in order, and never lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trace_serve.server.admission import Admission
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


async def test_ten_thousand_refusals_leave_nothing_behind() -> None:
    gate = admission(max_queue=0)
    ticket = await gate.acquire("a")
    for index in range(10_000):
        with pytest.raises(ApiError):
            await gate.acquire(f"key-{index}")
    ticket.release()
    assert (gate.in_flight, gate.queued, len(gate._per_key)) == (0, 0, 0)
