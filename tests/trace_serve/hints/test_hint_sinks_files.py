"""Hint directories: nothing partial, nothing through a link, nothing kept for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hint_factory import RECIPE_ID, make_file
from hint_sink_tools import WAIT_S, Recorder, make_job, make_queue

from trace_serve.errors import ConfigError
from trace_serve.hints import wire
from trace_serve.hints.sinks import Expired, expire, fetch, forget

_KILLED = """
import sys, time
from pathlib import Path
from trace_serve.hints.sinks import atomic

def parts():
    yield b"first half"
    print("half", flush=True)
    time.sleep(60)
    yield b"second half"

atomic.write(Path(sys.argv[1]), "r1.safetensors", parts())
"""

_FULL_DISK = """
import resource, sys
from pathlib import Path
from trace_serve.hints.sinks import AllowedTargets, Job, SinkQueue, parse_target

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
events = []
queue = SinkQueue(AllowedTargets(hint_dir=Path(sys.argv[1])), max_items=4, max_bytes=1 << 20, on_event=events.append)
for name, size in (("large", 10_000), ("small", 1000)):
    queue.submit(Job(name, parse_target("file"), lambda size=size: bytes(size), size))
queue.drain(30)
print([(event.kind, event.name) for event in events], queue.stats().failed, queue.stats().written)
"""


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_kill_minus_9_in_the_middle_of_a_write_leaves_nothing_visible(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    process.stdout.close()

    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".r1.safetensors.")
    assert left.read_bytes() == b"first half"
    expire(tmp_path)
    assert left.exists(), "a young temporary file may belong to a writer that lives"
    age(left, 7200)
    assert expire(tmp_path) == Expired(0, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_leaves_a_mark_and_no_part_and_smaller_hints_still_fit(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[('failed', 'large'), ('written', 'small')] 1 1\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.failed.json", "small.safetensors"]
    assert "File too large" in (tmp_path / "large.failed.json").read_text()


def test_a_reader_beside_a_rewriting_queue_sees_only_whole_files(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_items=2)
    stop = threading.Event()

    def rewrite() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            queue.submit(make_job("same", "file", bytes([version % 256]) * 200_000))

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen: set[bytes] = set()
        deadline = time.monotonic() + WAIT_S
        while len(seen) < 20 and time.monotonic() < deadline:
            seen.add(fetch(f"file://{tmp_path}/same.safetensors", timeout_s=WAIT_S))
    finally:
        stop.set()
        writer.join()
    assert len(seen) == 20
    assert all(len(data) == 200_000 and len(set(data)) == 1 for data in seen)
    queue.close(WAIT_S)


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"untouched")
    hints = tmp_path / "hints"
    hints.mkdir()
    (hints / "r.safetensors").symlink_to(secret)
    queue = make_queue(hints)

    receipt = queue.submit(make_job("r", "file", b"new"))

    assert queue.drain(WAIT_S) == 0
    assert fetch(receipt.uri) == b"new"
    assert secret.read_bytes() == b"untouched"
    (hints / "s.safetensors").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        fetch(f"file://{hints}/s.safetensors")
    queue.close()


def test_a_link_that_leads_out_of_the_allowed_directory_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    recorder = Recorder()
    queue = make_queue(None, f"file://{allowed}", recorder=recorder)

    queue.submit(make_job("r", f"file://{allowed}/link/deeper"))

    assert queue.drain(WAIT_S) == 0
    assert "outside of what the operator allowed" in recorder.events[-1].reason
    assert list(outside.iterdir()) == []
    queue.close()


def test_the_written_file_is_a_hint_file(tmp_path: Path) -> None:
    hints = make_file()
    queue = make_queue(tmp_path)
    receipt = queue.submit(make_job("r", "file", lambda: wire.to_bytes(hints)))
    read = wire.from_bytes(fetch(receipt.uri, timeout_s=WAIT_S), expect_recipe_id=RECIPE_ID)
    assert read.rows == hints.rows
    queue.close()


def test_expiry_goes_by_age_then_by_size_oldest_first_and_touches_only_hint_files(tmp_path: Path) -> None:
    for i, name in enumerate(["a", "b", "c", "d"]):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(bytes(100))
        age(path, 1000 - 100 * i)
    mark = tmp_path / "m.failed.json"
    mark.write_bytes(b"{}")
    age(mark, 5000)
    foreign = [tmp_path / name for name in ("notes.txt", "model.safetensors.index.json", "x.json")]
    for path in foreign:
        path.write_bytes(bytes(1000))
        age(path, 9000)
    link = tmp_path / "l.safetensors"
    link.symlink_to(foreign[0])
    (tmp_path / "dir.safetensors").mkdir()

    assert expire(tmp_path, older_than_s=950) == Expired(1, 100)
    assert not mark.exists()
    assert expire(tmp_path, max_bytes=200) == Expired(1, 100)
    assert sorted(path.name for path in tmp_path.glob("?.safetensors")) == ["c.safetensors", "d.safetensors", link.name]
    assert all(path.exists() for path in foreign)
    assert expire(tmp_path / "missing", older_than_s=1) == Expired(0, 0)


def test_the_writer_expires_by_itself_and_counts(tmp_path: Path) -> None:
    old = tmp_path / "old.safetensors"
    old.write_bytes(bytes(50))
    age(old, 100)
    recorder = Recorder()
    queue = make_queue(tmp_path, recorder=recorder, ttl_s=60.0, janitor_every_s=0.01)

    queue.submit(make_job("new", "file"))

    deadline = time.monotonic() + WAIT_S
    while not recorder.counts["expired"] and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.close(WAIT_S)
    assert queue.stats().expired == 1
    assert [event.bytes for event in recorder.events if event.kind == "expired"] == [50]
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]


def test_forget_removes_one_request_and_nothing_else(tmp_path: Path) -> None:
    for name in ("r.safetensors", "r.dropped.json", "r2.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert forget(tmp_path, "r")
    assert not forget(tmp_path, "r")
    assert [path.name for path in tmp_path.iterdir()] == ["r2.safetensors"]
    with pytest.raises(ConfigError):
        forget(tmp_path, "../r2")
