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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
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


def kill(running: Running) -> None:
    os.kill(running.engine()["pid"], signal.SIGKILL)


def freeze(running: Running) -> None:
    os.kill(running.engine()["pid"], signal.SIGSTOP)


def silence_scheduler(running: Running) -> None:
    running.set_health(alive=False)


@pytest.mark.parametrize("harm", [kill, freeze, silence_scheduler])
def test_a_lost_engine_is_noticed_its_requests_fail_and_it_is_replaced(
    tmp_path: Path, harm: Callable[[Running], None]
) -> None:
    with Running(tmp_path) as running:
        background = Background(running)
        old = running.engine()["pid"]
        harm(running)
        assert seconds_until(lambda: not ready(running), 5) < 5
        refused = httpx.post(running.url + CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert httpx.get(running.url + "/health/live").status_code == 200
        assert_both_failed(background.join())
        seconds_until(lambda: ready(running), 10)
        assert running.engine()["pid"] != old
        assert not Path(f"/proc/{old}").exists()
        body = {"messages": [{"role": "user", "content": "tokens=1"}]}
        assert httpx.post(running.url + CHAT, json=body).status_code == 200
        assert "trace_serve_engine_restarts 1.0" in httpx.get(running.url + "/metrics").text


def test_one_missed_heartbeat_stops_readiness_but_not_the_engine(tmp_path: Path) -> None:
    with Running(tmp_path, heartbeat_misses=50) as running:
        old = running.engine()["pid"]
        running.set_health(heartbeat_delay=1.0)
        seconds_until(lambda: not ready(running), 3)
        running.set_health(heartbeat_delay=0.0)
        seconds_until(lambda: ready(running), 3)
        assert running.engine()["pid"] == old


def test_an_engine_that_cannot_be_restarted_ends_the_server(tmp_path: Path) -> None:
    with Running(tmp_path, max_restarts=2) as running:
        (tmp_path / "fail-start").touch()
        kill(running)
        seconds_until(lambda: running.process.poll() is not None, 10)
        assert running.process.poll() == 4
        failures = [line["failures"] for line in running.log() if line["event"] == "engine_failed"]
        assert failures == [1, 2, 3]


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


def test_a_full_server_queues_then_refuses_with_retry_after(tmp_path: Path) -> None:
    with Running(tmp_path, max_in_flight=1, max_queue=1) as running:
        body = {"messages": [{"role": "user", "content": "tokens=20 delay=0.05"}]}
        codes: list[int] = []
        threads = [
            threading.Thread(target=lambda: codes.append(httpx.post(running.url + CHAT, json=body).status_code))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        seconds_until(lambda: gauge(running, "queued_requests") == 1 and gauge(running, "in_flight_requests") == 1, 5)
        refused = httpx.post(running.url + CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        for thread in threads:
            thread.join(10)
        assert codes == [200, 200]
        assert gauge(running, "in_flight_requests") == 0


def test_one_key_is_limited_with_429(tmp_path: Path) -> None:
    with Running(tmp_path, max_per_key=1) as running, httpx.Client(base_url=running.url) as client:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "tokens=50 delay=0.05"}], "stream": True}
        with client.stream("POST", CHAT, json=body, headers={"authorization": "Bearer one"}):
            refused = client.post(CHAT, json=body, headers={"authorization": "Bearer one"})
            body["messages"][0]["content"] = "tokens=1"
            other = client.post(CHAT, json=body, headers={"authorization": "Bearer two"})
        assert (refused.status_code, other.status_code) == (429, 200)
        assert int(refused.headers["retry-after"]) >= 1


def test_a_client_that_reads_nothing_is_dropped(tmp_path: Path) -> None:
    with Running(tmp_path, client_stall_s=0.5) as running:
        body = {"messages": [{"role": "user", "content": "tokens=200000"}], "stream": True}
        timeout = httpx.Timeout(10)
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", running.url + CHAT, json=body, timeout=timeout) as answer,
        ):
            assert answer.status_code == 200
            seconds_until(lambda: running.seen()["running"] == 0, 8)
        assert gauge(running, "in_flight_requests") == 0


def gauge(running: Running, name: str) -> float:
    text = httpx.get(running.url + "/metrics").text
    line = next(line for line in text.splitlines() if line.startswith(f"trace_serve_{name} "))
    return float(line.split()[1])


def pid_of(running: Running) -> int:
    assert running.process.pid is not None
    return running.process.pid
