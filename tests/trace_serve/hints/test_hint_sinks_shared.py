"""Shared memory between an engine and a trainer on the same machine, with real processes."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hint_sink_tools import WAIT_S, Recorder, make_job, make_queue

from trace_serve.errors import ConfigError, EngineError, HintFormatError
from trace_serve.hints.sinks import read_shared, release, remove_stale
from trace_serve.hints.sinks.shared import SharedSpace

_ENGINE = """
import sys
from pathlib import Path
from trace_serve.hints.sinks import AllowedTargets, Job, SinkQueue, parse_target

queue = SinkQueue(
    AllowedTargets(shm=True), max_items=8, max_bytes=1 << 20, on_event=lambda event: None, run_id=sys.argv[2],
    shm_root=Path(sys.argv[1]),
)
for name in ("one", "two"):
    receipt = queue.submit(Job(name, parse_target("shm"), lambda name=name: name.encode() * 50_000, 1000))
    queue.drain(20)
    print(receipt.uri, flush=True)
sys.stdin.readline()
queue.close()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory in real shared memory, so that tests neither see nor disturb an engine that runs here."""
    with TemporaryDirectory(prefix="sink-test-", dir="/dev/shm") as directory:
        yield Path(directory)


def start_engine(root: Path, run_id: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(root), run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate("\n", timeout=WAIT_S)
    return process.returncode


def test_a_trainer_reads_what_another_process_published_and_frees_it(root: Path) -> None:
    engine = start_engine(root, "run1")
    assert engine.stdout is not None
    uris = [engine.stdout.readline().strip() for _ in range(2)]

    assert uris == ["shm://run1/one", "shm://run1/two"]
    for uri, word in zip(uris, (b"one", b"two"), strict=True):
        assert read_shared(uri, shm_root=root) == word * 50_000
    assert release(uris[0], shm_root=root)
    assert not release(uris[0], shm_root=root)
    with pytest.raises(EngineError, match="no hints there"):
        read_shared(uris[0], shm_root=root)
    assert read_shared(uris[1], shm_root=root), "a reader that ends must not take the segment with it"
    (directory,) = root.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert finish(engine) == 0
    assert list(root.iterdir()) == []


def test_segments_of_a_killed_engine_go_at_the_next_start_and_those_of_a_living_one_stay(root: Path) -> None:
    dead, living = start_engine(root, "dead"), start_engine(root, "living")
    for engine in (dead, living):
        assert engine.stdout is not None
        assert [engine.stdout.readline() for _ in range(2)][1].startswith("shm://")
    dead.send_signal(signal.SIGKILL)
    dead.communicate(timeout=WAIT_S)
    assert read_shared("shm://dead/one", shm_root=root), "hints outlive their engine until somebody cleans up"

    queue = make_queue(shm_root=root, run_id="next")
    queue.submit(make_job("r", "shm"))
    assert queue.drain(WAIT_S) == 0

    assert sorted(path.name for path in root.iterdir()) == ["trace-serve-hints-living", "trace-serve-hints-next"]
    assert remove_stale(root) == []
    assert read_shared("shm://living/two", shm_root=root)
    assert finish(living) == 0
    queue.close()


def test_a_full_budget_takes_read_hints_first_then_the_oldest_and_says_so(root: Path) -> None:
    recorder = Recorder()
    queue = make_queue(shm_root=root, run_id="run", recorder=recorder, shm_max_bytes=350)

    def publish(name: str) -> None:
        queue.submit(make_job(name, "shm", name.encode() * 50))
        assert queue.drain(WAIT_S) == 0

    for name in ("a", "b", "c"):
        publish(name)
    read_shared("shm://run/b", shm_root=root)
    publish("d")
    assert recorder.counts == {"written": 4}, "b went, and b was read"
    publish("e")

    assert [event.name for event in recorder.events if event.kind == "expired"] == ["a"]
    assert queue.stats().expired == 1
    with pytest.raises(EngineError, match="the hints were expired: shared memory was needed for newer hints"):
        read_shared("shm://run/a", shm_root=root)
    for name in ("c", "d", "e"):
        assert read_shared(f"shm://run/{name}", shm_root=root) == name.encode() * 50
    queue.close()


def test_released_hints_make_room_without_an_expiry(root: Path) -> None:
    recorder = Recorder()
    queue = make_queue(shm_root=root, run_id="run", recorder=recorder, shm_max_bytes=250)
    for i in range(20):
        queue.submit(make_job(f"r{i}", "shm", bytes(100)))
        assert queue.drain(WAIT_S) == 0
        assert read_shared(f"shm://run/r{i}", shm_root=root) == bytes(100)
        assert release(f"shm://run/r{i}", shm_root=root)
    assert recorder.counts == {"written": 20}
    queue.close()


def test_hints_larger_than_the_budget_fail_with_a_mark_and_cost_no_others(root: Path) -> None:
    queue = make_queue(shm_root=root, run_id="run", shm_max_bytes=200)
    queue.submit(make_job("small", "shm", bytes(50)))
    queue.submit(make_job("large", "shm", bytes(500)))
    assert queue.drain(WAIT_S) == 0

    with pytest.raises(EngineError, match=r"the hints were failed: .*more than the whole budget of 200 bytes"):
        read_shared("shm://run/large", shm_root=root)
    assert read_shared("shm://run/small", shm_root=root) == bytes(50)
    queue.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "header", "magic"])
def test_a_damaged_segment_is_refused(root: Path, damage: str) -> None:
    space = SharedSpace("run", 1000, lambda name, size: None, root=root)
    space.write("r", b"0123456789")
    path = space.directory / "r.hints"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "magic":
        data[0] ^= 1
    path.write_bytes(data[: {"cut": -1, "header": 20}.get(damage, len(data))])
    with pytest.raises(HintFormatError):
        read_shared("shm://run/r", shm_root=root)
    space.close()


def test_marks_are_bounded(root: Path) -> None:
    space = SharedSpace("run", 1000, lambda name, size: None, root=root)
    for i in range(300):
        space.mark(f"r{i}", "dropped", "full")
    names = {path.name for path in space.directory.glob("*.json")}
    assert len(names) == 256
    assert "r299.dropped.json" in names
    assert "r0.dropped.json" not in names
    space.close()


@pytest.mark.parametrize("uri", ["shm://run", "shm://../r", "shm://run/../../etc", "file:///run/r", "run/r"])
def test_a_uri_cannot_leave_shared_memory(root: Path, uri: str) -> None:
    for function in (read_shared, release):
        with pytest.raises(ConfigError):
            function(uri, shm_root=root)


def test_the_directory_of_another_run_is_not_taken_over(root: Path) -> None:
    first = SharedSpace("run", 1000, lambda name, size: None, root=root)
    first.write("r", b"x")
    with pytest.raises(OSError, match="not empty"):
        SharedSpace("run", 1000, lambda name, size: None, root=root)
    assert read_shared("shm://run/r", shm_root=root) == b"x"
    assert [path.name for path in root.iterdir()] == [first.directory.name]
    first.close()
    assert list(root.iterdir()) == []
