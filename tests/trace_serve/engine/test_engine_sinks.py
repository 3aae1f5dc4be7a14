"""Hints that leave a real engine through shared memory and through URLs."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import engine_model
import pytest
from engine_client import assert_rows_equal, decoded, flush, generate

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import EngineError
from trace_serve.hints import sinks, wire
from trace_serve.policy.manifest import Policy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WAIT_S = 60.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sinks")


@pytest.fixture(scope="module")
def engine(fp4_policy: Policy, root: Path) -> Iterator[EngineProcess]:
    config = EngineConfig(
        model=fp4_policy.path,
        recipe=fp4_policy.recipe,
        hint_shm=True,
        hint_urls=(f"file://{root}/allowed",),
        log_path=root / "engine.log",
        max_total_tokens=2048,
    )
    process = EngineProcess(config)
    process.start()
    process.wait_ready(400)
    yield process
    process.stop()


def test_shared_memory_and_a_url_carry_the_rows_that_inline_carries(engine: EngineProcess, root: Path) -> None:
    prompt = engine_model.token_ids(21, 9)
    inline = decoded(generate(engine, prompt))
    for sink, start in (("shm", "shm://"), (f"file://{root}/allowed/run-1", f"file://{root}/allowed/run-1/")):
        flush(engine)
        told = generate(engine, prompt, hints={"sink": sink})["meta_info"]["trace_hints"]
        assert told["status"] == "queued"
        assert told["uri"].startswith(start)
        hints = wire.from_bytes(sinks.fetch(told["uri"], timeout_s=WAIT_S), expect_token_ids=inline.token_ids)
        assert_rows_equal(hints, inline)
        if sink == "shm":
            assert sinks.release(told["uri"])


@pytest.mark.parametrize("below", ["", "/allowed2", "/allowed/../other"])
def test_a_url_that_is_not_allowed_is_a_bad_request(engine: EngineProcess, root: Path, below: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        generate(engine, [1, 2, 3], hints={"sink": f"file://{root}{below}"})
    assert caught.value.code == 400
    assert b"trace_hints.sink" in caught.value.read()
    assert generate(engine, [1, 2, 3], hints=None)["meta_info"]["completion_tokens"] == 6


def test_hints_that_cannot_be_written_are_counted_and_cost_neither_the_answer_nor_the_next(
    engine: EngineProcess, root: Path
) -> None:
    failed = engine.request("/trace/report")["hint_files"]["failed"]
    (root / "allowed").mkdir(exist_ok=True)
    (root / "allowed" / "occupied").write_text("a file where a directory would have to be")

    answer = generate(engine, [4, 5, 6], hints={"sink": f"file://{root}/allowed/occupied"})

    assert answer["meta_info"]["completion_tokens"] == 6
    deadline = time.monotonic() + WAIT_S
    while engine.request("/trace/report")["hint_files"]["failed"] == failed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.request("/trace/report")["hint_files"]["failed"] == failed + 1
    told = generate(engine, [4, 5, 6], hints={"sink": "shm"})["meta_info"]["trace_hints"]
    assert wire.from_bytes(sinks.fetch(told["uri"], timeout_s=WAIT_S)).rows == 8


def test_a_stopped_engine_takes_its_shared_memory_along(engine: EngineProcess) -> None:
    told = generate(engine, [7, 8, 9], hints={"sink": "shm"})["meta_info"]["trace_hints"]
    assert sinks.read_shared(told["uri"], timeout_s=WAIT_S)
    engine.stop()
    # Processes of the killed group may take a moment to let go of it.
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        sinks.remove_stale()
        try:
            sinks.read_shared(told["uri"])
        except EngineError:
            return
        time.sleep(0.1)
    pytest.fail("the segment outlived its engine")
