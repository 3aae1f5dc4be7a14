"""The queue: what it holds, what it drops, and that it never makes the caller wait."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hint_sink_tools import WAIT_S, FullFileSystem, Recorder, SlowFileSystem, make_job, make_queue
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_serve.errors import EngineError
from trace_serve.hints.sinks import SinkEvent, fetch


@pytest.fixture
def slow() -> Iterator[type[SlowFileSystem]]:
    SlowFileSystem.store.clear()
    SlowFileSystem.go.clear()
    SlowFileSystem.started.clear()
    yield SlowFileSystem
    SlowFileSystem.go.set()


@pytest.fixture
def full() -> type[FullFileSystem]:
    FullFileSystem.store.clear()
    FullFileSystem.attempts = FullFileSystem.failures = 0
    return FullFileSystem


def test_what_was_queued_can_be_fetched_from_its_uri(tmp_path: Path) -> None:
    recorder = Recorder()
    queue = make_queue(tmp_path / "hints", "memory://queued", f"file://{tmp_path}/below", recorder=recorder)
    payloads = {target: target.encode() for target in ("file", "memory://queued/a", f"file://{tmp_path}/below/b")}

    receipts = {target: queue.submit(make_job("r-1", target, payload)) for target, payload in payloads.items()}

    assert {target: fetch(receipt.uri, timeout_s=WAIT_S) for target, receipt in receipts.items()} == payloads
    assert queue.drain(WAIT_S) == 0
    stats = queue.stats()
    assert (stats.queued, stats.written, stats.bytes_written) == (3, 3, sum(map(len, payloads.values())))
    assert (stats.pending_items, stats.pending_bytes) == (0, 0)
    assert recorder.counts == {"written": 3}
    queue.close()


def test_a_sink_that_hangs_neither_delays_a_submit_nor_another_place(
    tmp_path: Path, slow: type[SlowFileSystem]
) -> None:
    queue = make_queue(tmp_path / "hints", "slow://bucket", max_items=5)

    receipts = [queue.submit(make_job(f"r{i}", "slow://bucket")) for i in range(50)]

    # Every submit came back although not one write did.
    assert slow.started.wait(WAIT_S)
    assert queue.stats().written == 0
    assert [receipt.status for receipt in receipts] == ["queued"] * 5 + ["dropped"] * 45
    assert "limit of 5 items" in receipts[-1].reason
    local = queue.submit(make_job("beside", "file", b"local"))
    assert fetch(local.uri, timeout_s=WAIT_S) == b"local"
    assert queue.stats().pending_items == 5
    slow.go.set()
    assert queue.drain(WAIT_S) == 0
    assert queue.stats().written == 6
    with pytest.raises(EngineError, match="the hints were dropped: the queue holds its limit of 5 items"):
        fetch(receipts[-1].uri)
    queue.close()


def test_the_byte_budget_drops_what_does_not_fit_and_says_so(tmp_path: Path) -> None:
    gate = threading.Event()
    recorder = Recorder()
    queue = make_queue(tmp_path, recorder=recorder, max_bytes=100)

    def encode() -> bytes:
        assert gate.wait(WAIT_S)
        return b"x"

    statuses = [queue.submit(make_job(f"r{i}", "file", encode, size)).status for i, size in enumerate([60, 60, 40, 1])]

    assert statuses == ["queued", "dropped", "queued", "dropped"]
    assert queue.stats().pending_bytes == 100
    assert [event.name for event in recorder.events] == ["r1", "r3"]
    assert "limit of 100 bytes" in recorder.events[0].reason
    gate.set()
    assert queue.drain(WAIT_S) == 0
    mark = json.loads((tmp_path / "r1.dropped.json").read_text())
    assert mark == {"schema_version": 1, "name": "r1", "status": "dropped", "reason": recorder.events[0].reason}
    assert queue.submit(make_job("r1", "file", b"second try", 60)).status == "queued"
    assert queue.drain(WAIT_S) == 0
    assert sorted(path.name for path in tmp_path.glob("r1.*")) == ["r1.safetensors"]
    queue.close()


@settings(deadline=None)
@given(st.lists(st.integers(-1, 70), max_size=40), st.integers(1, 6), st.integers(1, 150))
def test_no_order_of_sizes_passes_a_bound_or_loses_a_count(sizes: list[int], max_items: int, max_bytes: int) -> None:
    gate = threading.Event()
    queue = make_queue(None, "memory://counts", max_items=max_items, max_bytes=max_bytes)

    def encode() -> bytes:
        assert gate.wait(WAIT_S)
        return b"x"

    queued = 0
    for i, size in enumerate(sizes):
        queued += queue.submit(make_job(f"r{i}", "memory://counts", encode, size)).status == "queued"
        stats = queue.stats()
        assert stats.pending_items == queued <= max_items
        assert stats.pending_bytes <= max_bytes
        assert stats.queued + stats.dropped == i + 1
    gate.set()
    assert queue.drain(WAIT_S) == 0
    assert queue.stats().written == queued
    assert queue.close() == 0


def test_many_threads_lose_nothing_without_a_sign(tmp_path: Path) -> None:
    recorder = Recorder()
    queue = make_queue(tmp_path, recorder=recorder, max_items=7)
    receipts: dict[str, str] = {}

    def submit(thread: int) -> None:
        for i in range(150):
            name = f"t{thread}-{i}"
            receipts[name] = queue.submit(make_job(name, "file", name.encode())).status

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.drain(WAIT_S) == 0

    stats = queue.stats()
    assert stats.queued + stats.dropped == 600
    assert stats.written == stats.queued == recorder.counts["written"]
    assert stats.dropped == recorder.counts["dropped"] > 0
    for name, status in receipts.items():
        if status == "queued":
            assert (tmp_path / f"{name}.safetensors").read_bytes() == name.encode()
        else:
            assert json.loads((tmp_path / f"{name}.dropped.json").read_text())["status"] == "dropped"
    queue.close()


def test_an_encoder_that_fails_leaves_a_mark_and_the_next_hints_are_written(tmp_path: Path) -> None:
    recorder = Recorder()
    queue = make_queue(tmp_path, recorder=recorder)

    def broken() -> bytes:
        raise ValueError("rows do not fit")

    lost = queue.submit(make_job("bad", "file", broken))
    kept = queue.submit(make_job("good", "file", b"fine"))

    assert fetch(kept.uri, timeout_s=WAIT_S) == b"fine"
    with pytest.raises(EngineError, match="the hints were failed: ValueError: rows do not fit"):
        fetch(lost.uri)
    queue.drain(WAIT_S)
    assert recorder.counts == {"failed": 1, "written": 1}
    queue.close()


def test_a_url_is_tried_again_and_encoded_once(full: type[FullFileSystem]) -> None:
    recorder = Recorder()
    queue = make_queue(None, "full://bucket", recorder=recorder)
    full.failures = 2
    encoded = []

    def encode() -> bytes:
        encoded.append(1)
        return b"whole payload"

    receipt = queue.submit(make_job("r", "full://bucket/a", encode))

    assert fetch(receipt.uri, timeout_s=WAIT_S) == b"whole payload"
    assert queue.drain(WAIT_S) == 0
    assert recorder.counts == {"retried": 2, "written": 1}
    assert len(encoded) == 1
    assert [path for path in full.store if path.endswith(".tmp")] == []
    queue.close()


def test_a_url_that_stays_full_fails_with_a_mark_and_no_partial_object(full: type[FullFileSystem]) -> None:
    recorder = Recorder()
    queue = make_queue(None, "full://bucket", recorder=recorder)
    full.failures = 1000

    receipt = queue.submit(make_job("r", "full://bucket/a"))

    assert queue.drain(WAIT_S) == 0
    assert recorder.counts == {"retried": 2, "failed": 1}
    assert "No space left" in recorder.events[-1].reason
    assert list(full.store) == ["/bucket/a/r.failed.json"]
    with pytest.raises(EngineError, match=r"the hints were failed: OSError: .*No space left"):
        fetch(receipt.uri)
    queue.close()


def test_a_retry_that_waits_lets_others_pass(full: type[FullFileSystem]) -> None:
    queue = make_queue(None, "full://bucket", "memory://passing", back_off_s=(3600.0,))
    full.failures = 1

    queue.submit(make_job("waits", "full://bucket"))
    passing = queue.submit(make_job("passes", "memory://passing", b"passed"))

    assert fetch(passing.uri, timeout_s=WAIT_S) == b"passed"
    assert queue.stats().pending_items == 1
    assert queue.close() == 1
    assert queue.stats().dropped == 1


def test_close_drops_what_is_left_with_a_mark_and_refuses_more(tmp_path: Path) -> None:
    gate, started = threading.Event(), threading.Event()
    recorder = Recorder()
    queue = make_queue(tmp_path, recorder=recorder)

    def encode() -> bytes:
        started.set()
        assert gate.wait(WAIT_S)
        return b"x"

    queue.submit(make_job("running", "file", encode))
    queue.submit(make_job("waiting", "file"))
    assert started.wait(WAIT_S)

    assert queue.close(timeout_s=0.0) == 1
    assert json.loads((tmp_path / "waiting.dropped.json").read_text())["reason"] == "the engine stopped"
    assert queue.submit(make_job("late", "file")).reason == "the queue is closed"
    gate.set()
    assert queue.drain(WAIT_S) == 0
    assert fetch(f"file://{tmp_path}/running.safetensors", timeout_s=WAIT_S) == b"x"
    assert recorder.counts == {"dropped": 2, "written": 1}


def test_a_callback_that_raises_does_not_stop_the_writer(tmp_path: Path) -> None:
    def callback(event: SinkEvent) -> None:
        raise RuntimeError(event.kind)

    queue = make_queue(tmp_path, recorder=callback)
    first = queue.submit(make_job("a", "file", b"1"))
    second = queue.submit(make_job("b", "file", b"2"))
    assert [fetch(receipt.uri, timeout_s=WAIT_S) for receipt in (first, second)] == [b"1", b"2"]
    queue.close()


def test_outcomes_of_both_writers_are_told_one_after_the_other(tmp_path: Path) -> None:
    at_once, most = 0, 0

    def callback(event: SinkEvent) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.002)
        at_once -= 1

    queue = make_queue(tmp_path, "memory://told", recorder=callback)
    for i in range(20):
        queue.submit(make_job(f"r{i}", "file"))
        queue.submit(make_job(f"r{i}", "memory://told"))
    assert queue.close(WAIT_S) == 0
    assert queue.stats().written == 40
    assert most == 1


_FORK = """
import os, sys, threading
from pathlib import Path
from trace_serve.hints.sinks import AllowedTargets, Job, SinkQueue, fetch, parse_target

root = Path(sys.argv[1])
queue = SinkQueue(
    AllowedTargets(hint_dir=root, shm=True), max_items=4, max_bytes=100, on_event=lambda event: None, shm_root=root
)
gate = threading.Event()
for name in ("parent-1", "parent-2"):
    queue.submit(Job(name, parse_target("file"), lambda: gate.wait(20) and b"parent", 40))
queue._counting.acquire()
child = os.fork()
if child == 0:
    receipts = [queue.submit(Job("child", parse_target(t), lambda: b"child", 90)) for t in ("file",)]
    left = queue.drain(20)
    ok = not left and queue.stats().written == 1 and fetch(receipts[0].uri) == b"child"
    os._exit(0 if ok else 1)
queue._counting.release()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
gate.set()
left = queue.drain(20)
stats = queue.stats()
print(status, left, stats.queued, stats.written, sorted(path.name for path in root.glob("*.safetensors")))
"""


def test_a_forked_child_starts_with_an_empty_queue_and_a_thread_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FORK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    expected = "0 0 2 2 ['child.safetensors', 'parent-1.safetensors', 'parent-2.safetensors']\n"
    assert (done.stdout, done.stderr) == (expected, "")
