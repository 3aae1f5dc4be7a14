"""A lost engine is noticed within seconds, its requests get an error, and it is restarted or given up.

The engine is the scripted upstream in a process of its own, so that it can be killed, frozen or made to lie.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from harness import ENGINE_FILE, Running

CHAT = "/v1/chat/completions"


def ready(running: Running) -> bool:
    try:
        return httpx.get(running.url + "/health/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def seconds_until(check: Callable[[], bool], limit: float) -> float:
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < limit, f"not within {limit} s"
        time.sleep(0.05)
    return time.monotonic() - began


class Background:
    """One streamed and one whole request that would take minutes."""

    def __init__(self, running: Running) -> None:
        self.answers: dict[bool, httpx.Response] = {}
        self.threads = [threading.Thread(target=self._ask, args=(running.url, stream)) for stream in (False, True)]
        for thread in self.threads:
            thread.start()
        seconds_until(lambda: running.seen()["running"] == 2, 5)
        time.sleep(0.2)

    def _ask(self, url: str, stream: bool) -> None:
        body = {"messages": [{"role": "user", "content": "tokens=5000 delay=0.02"}], "stream": stream}
        self.answers[stream] = httpx.post(url + CHAT, json=body, timeout=30)

    def join(self) -> dict[bool, httpx.Response]:
        for thread in self.threads:
            thread.join(20)
        return self.answers


def assert_both_failed(answers: dict[bool, httpx.Response]) -> None:
    assert answers[False].status_code in (502, 503)
    assert "error" in answers[False].json()
    last = answers[True].text.strip().rsplit("\n\n", 1)[-1]
    assert "error" in json.loads(last.removeprefix("data: "))
    assert "[DONE]" not in answers[True].text
    assert '"abort"' not in answers[True].text


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A front-end whose engine may be harmed; each test leaves it with a healthy one."""
    with Running(tmp_path_factory.mktemp("watched"), heartbeat_misses=5) as running:
        yield running


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A front-end with two places, a queue of one, and one request a key."""
    limits = {"max_in_flight": 2, "max_queue": 1, "max_per_key": 1, "client_stall_s": 0.5}
    with Running(tmp_path_factory.mktemp("narrow"), **limits) as running:
        yield running


def kill(running: Running) -> None:
    os.kill(running.engine()["pid"], signal.SIGKILL)


def freeze(running: Running) -> None:
    os.kill(running.engine()["pid"], signal.SIGSTOP)


def silence_scheduler(running: Running) -> None:
    running.set_health(alive=False)


def run_out_of_memory(running: Running) -> None:
    """The kernel kills for lack of memory with SIGKILL; Python's own MemoryError ends the process with a traceback."""
    body = {"messages": [{"role": "user", "content": "tokens=1 die_after=0"}]}
    with contextlib.suppress(httpx.TransportError):
        httpx.post(running.url + CHAT, json=body, timeout=20)


@pytest.mark.parametrize("harm", [kill, freeze, silence_scheduler, run_out_of_memory])
def test_a_lost_engine_is_noticed_its_requests_fail_and_it_is_replaced(
    watched: Running, harm: Callable[[Running], None]
) -> None:
    background = Background(watched)
    old, restarts = watched.engine()["pid"], gauge(watched, "engine_restarts_total")
    harm(watched)
    assert seconds_until(lambda: not ready(watched), 5) < 5
    refused = httpx.post(watched.url + CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert httpx.get(watched.url + "/health/live").status_code == 200
    assert_both_failed(background.join())
    seconds_until(lambda: ready(watched), 15)
    assert watched.engine()["pid"] != old
    assert not Path(f"/proc/{old}").exists()
    body = {"messages": [{"role": "user", "content": "tokens=1"}]}
    assert httpx.post(watched.url + CHAT, json=body).status_code == 200
    assert gauge(watched, "engine_restarts_total") == restarts + 1
    assert not zombies(watched)


def test_a_quarantined_engine_is_not_ready_and_not_restarted(watched: Running) -> None:
    old = watched.engine()["pid"]
    watched.set_health(quarantined=True)
    seconds_until(lambda: not ready(watched), 3)
    assert "two versions" in httpx.get(watched.url + "/health/ready").text
    watched.set_health(quarantined=False)
    seconds_until(lambda: ready(watched), 3)
    assert watched.engine()["pid"] == old


def test_one_missed_heartbeat_stops_readiness_but_not_the_engine(watched: Running) -> None:
    old = watched.engine()["pid"]
    watched.set_health(heartbeat_delay=1.0)
    seconds_until(lambda: not ready(watched), 3)
    watched.set_health(heartbeat_delay=0.0)
    seconds_until(lambda: ready(watched), 3)
    assert watched.engine()["pid"] == old


def test_a_scheduler_that_is_silent_for_seconds_is_not_ready_but_keeps_its_requests(watched: Running) -> None:
    old = watched.engine()["pid"]
    watched.set_health(age_s=6.0)
    seconds_until(lambda: not ready(watched), 3)
    body = {"messages": [{"role": "user", "content": "tokens=1"}]}
    assert httpx.post(watched.url + CHAT, json=body).status_code == 200
    watched.set_health(age_s=0.1)
    seconds_until(lambda: ready(watched), 3)
    assert watched.engine()["pid"] == old


def test_an_engine_that_cannot_be_restarted_ends_the_server(tmp_path: Path) -> None:
    with Running(tmp_path, max_restarts=2) as running:
        (tmp_path / "fail-start").touch()
        kill(running)
        seconds_until(lambda: running.process.poll() is not None, 10)
        assert running.process.poll() == 4
        failures = [line["failures"] for line in running.log() if line["event"] == "engine_failed"]
        assert failures == [1, 2, 3]


def test_an_engine_that_dies_again_and_again_ends_the_server(tmp_path: Path) -> None:
    with Running(tmp_path, max_restarts=1) as running:
        for _ in range(2):
            old = running.engine()["pid"]
            kill(running)
            seconds_until(lambda old=old: running.process.poll() is not None or running.engine()["pid"] != old, 30)
        seconds_until(lambda: running.process.poll() is not None, 30)
        assert running.process.poll() == 4
        assert not Path(f"/proc/{running.engine()['pid']}").exists()


def test_an_engine_that_loaded_other_files_is_never_served(tmp_path: Path) -> None:
    (tmp_path / "reported-digest").write_text("sha256:" + "0" * 64)
    running = Running(tmp_path, max_restarts=0)
    running.process.start()
    seconds_until(lambda: running.process.poll() is not None, 15)
    assert running.process.poll() == 4
    assert "policy_digest" in (tmp_path / "server.log").read_text()
    assert not Path(f"/proc/{running.engine()['pid']}").exists()


def test_sigterm_lets_a_running_request_finish_and_ends_with_0(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        answer: list[httpx.Response] = []
        body = {"messages": [{"role": "user", "content": "tokens=20 delay=0.05"}], "stream": True}
        thread = threading.Thread(target=lambda: answer.append(httpx.post(running.url + CHAT, json=body, timeout=20)))
        thread.start()
        seconds_until(lambda: running.seen()["running"] == 1, 5)
        engine = running.engine()["pid"]
        os.kill(pid_of(running), signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url + "/health/ready")
        thread.join(20)
        assert answer[0].text.endswith("data: [DONE]\n\n")
        seconds_until(lambda: running.process.poll() is not None, 10)
        assert running.process.poll() == 0
        assert not Path(f"/proc/{engine}").exists()


def test_sigterm_cuts_what_is_not_done_at_the_deadline(tmp_path: Path) -> None:
    with Running(tmp_path, drain_s=0.5) as running:
        background = Background(running)
        began = time.monotonic()
        os.kill(pid_of(running), signal.SIGTERM)
        answers = background.join()
        assert_both_failed(answers)
        assert "stopping" in answers[True].text
        seconds_until(lambda: running.process.poll() is not None, 10)
        assert running.process.poll() == 0
        assert 0.5 <= time.monotonic() - began < 5


def test_sigterm_while_the_engine_starts_ends_both(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.process.start()
    seconds_until(lambda: (tmp_path / ENGINE_FILE).exists(), 15)
    assert running.process.stop(10) == 0
    assert not Path(f"/proc/{running.engine()['pid']}").exists()


def test_a_full_server_queues_then_refuses_with_retry_after(narrow: Running) -> None:
    body = {"messages": [{"role": "user", "content": "tokens=30 delay=0.05"}]}
    codes: list[int] = []

    def ask(key: str) -> httpx.Response:
        return httpx.post(narrow.url + CHAT, json=body, headers={"authorization": f"Bearer {key}"}, timeout=20)

    threads = [threading.Thread(target=lambda key=key: codes.append(ask(key).status_code)) for key in "abc"]
    for thread in threads:
        thread.start()
    seconds_until(lambda: gauge(narrow, "queued_requests") == 1 and gauge(narrow, "in_flight_requests") == 2, 5)
    refused = ask("d")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    for thread in threads:
        thread.join(20)
    assert codes == [200, 200, 200]
    assert gauge(narrow, "in_flight_requests") == 0


def test_one_key_is_limited_with_429(narrow: Running) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "tokens=50 delay=0.05"}], "stream": True}
    short = {"messages": [{"role": "user", "content": "tokens=1"}]}
    one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    with httpx.Client(base_url=narrow.url) as client, client.stream("POST", CHAT, json=body, headers=one):
        refused = client.post(CHAT, json=short, headers=one)
        other = client.post(CHAT, json=short, headers=two)
    assert (refused.status_code, other.status_code) == (429, 200)
    assert int(refused.headers["retry-after"]) >= 1


def test_a_client_that_reads_nothing_is_dropped(narrow: Running) -> None:
    body = {"messages": [{"role": "user", "content": "tokens=200000"}], "stream": True}
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", narrow.url + CHAT, json=body, timeout=20) as answer,
    ):
        assert answer.status_code == 200
        seconds_until(lambda: narrow.seen()["running"] == 0, 10)
    assert gauge(narrow, "in_flight_requests") == 0


def zombies(running: Running) -> list[psutil.Process]:
    children = psutil.Process(pid_of(running)).children(recursive=True)
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


def gauge(running: Running, name: str) -> float:
    text = httpx.get(running.url + "/metrics").text
    line = next(line for line in text.splitlines() if line.startswith(f"trace_serve_{name} "))
    return float(line.split()[1])


def pid_of(running: Running) -> int:
    assert running.process.pid is not None
    return running.process.pid
