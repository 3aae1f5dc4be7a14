"""A flood of one key leaves the others their share, and nothing is lost, scanned or kept."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_serve.server.admission.fair_queue import FairQueue

KEYS = st.sampled_from("abcd")


def drain(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_a_key_that_comes_late_is_not_behind_a_flood() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(1000):
        queue.push("flood", f"flood-{index}", 10)
    for _ in range(100):
        queue.pop()
    queue.push("modest", "modest", 10)
    assert "modest" in [queue.pop() for _ in range(2)]


def test_keys_share_by_tokens_and_not_by_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("large", "large", 1000)
        queue.push("small", "small", 100)
    first = Counter(queue.pop() for _ in range(44))
    assert first["large"] == pytest.approx(4, abs=1)
    assert first["small"] == pytest.approx(40, abs=1)


def test_what_a_key_got_while_nobody_else_asked_is_hardly_held_against_it() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.charge("old", 100)
    queue.push("old", "old", 10)
    for _ in range(200):
        queue.push("new", "new", 10)
    assert drain(queue).index("old") <= 11, "it waits for one request's worth, not for all that it had"


def test_a_request_that_gave_up_is_skipped() -> None:
    queue: FairQueue[str] = FairQueue()
    first = queue.push("a", "first", 1)
    queue.push("a", "second", 1)
    gone = queue.push("b", "gone", 1)
    assert queue.remove("a", first)
    assert queue.remove("b", gone)
    assert not queue.remove("b", gone)
    assert drain(queue) == ["second"]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", "head", 1)
    for index in range(10_000):
        queue.remove(f"key-{index}", queue.push(f"key-{index}", "x", 1))
    assert len(queue._heap) < 200
    assert queue.pop() == "head"
    for index in range(10_000):
        queue.push(f"key-{index}", "x", 1)
        queue.pop()
    assert len(queue._times) < 4000
    assert len(queue._heap) == len(queue._in_heap) == len(queue._waiting) == len(queue._by_length) == 0


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "drop", "charge"]), KEYS, st.integers(0, 500))))
def test_it_is_a_first_come_first_served_queue_of_each_key(steps: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model: dict[str, OrderedDict[int, None]] = {key: OrderedDict() for key in "abcd"}
    owners: dict[int, tuple[str, int]] = {}
    for index, (step, key, cost) in enumerate(steps):
        if step == "push":
            owners[index] = key, queue.push(key, index, cost)
            model[key][owners[index][1]] = None
        elif step == "charge":
            queue.charge(key, cost)
        elif step == "remove" and model[key]:
            number = list(model[key])[cost % len(model[key])]
            assert queue.remove(key, number)
            del model[key][number]
        elif step in ("pop", "drop") and len(queue):
            longest = queue.longest
            owner, number = owners[queue.pop() if step == "pop" else queue.drop_newest()]
            if step == "pop":
                assert number == next(iter(model[owner]))
            else:
                assert len(model[owner]) == longest
                assert number == next(reversed(model[owner]))
            del model[owner][number]
        assert len(queue) == sum(map(len, model.values()))
        assert queue.longest == max(map(len, model.values()))
        assert [queue.waiting(each) for each in "abcd"] == [len(model[each]) for each in "abcd"]
