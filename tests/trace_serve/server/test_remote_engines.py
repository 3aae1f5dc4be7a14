"""Engines that somebody else runs: what they must prove, how loss and return are noticed, who gets a request."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness import Running
from remote_engines import KEY, RemoteScript, ask, front_end, ready, wait_until

from trace_serve.errors import ConfigError
from trace_serve.server.engines.remote import check_remote, remote_addresses
from trace_serve.settings import Settings


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, RemoteScript, RemoteScript]]:
    """A front-end before two engines; each test leaves both engines healthy."""
    directory = tmp_path_factory.mktemp("pair")
    with (
        RemoteScript() as one,
        RemoteScript() as two,
        front_end(directory, [one.url, two.url]) as running,
    ):
        yield running, one, two


class Slow:
    """A stream that takes minutes, on whichever engine it goes to."""

    def __init__(self, running: Running) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(running,))
        self._thread.start()

    def _ask(self, running: Running) -> None:
        self.answer = ask(running, "tokens=9000 delay=0.02", stream=True)

    def join(self) -> httpx.Response:
        self._thread.join(60)
        assert self.answer is not None
        return self.answer


def both_serve(running: Running, *engines: RemoteScript) -> bool:
    """Whether each engine gets requests when the others are busy; simultaneous requests are spread."""
    before = [len(engine.seen()["seen"]) for engine in engines]
    threads = [threading.Thread(target=ask, args=(running, "tokens=20 delay=0.02")) for _ in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return all(len(engine.seen()["seen"]) > count for engine, count in zip(engines, before, strict=True))


def test_a_request_goes_to_the_engine_with_the_fewest(pair: tuple[Running, RemoteScript, RemoteScript]) -> None:
    running, one, two = pair
    wait_until(lambda: both_serve(running, one, two), "both engines are in the choice")
    slow = Slow(running)
    wait_until(lambda: one.seen()["running"] + two.seen()["running"] == 1, "the stream runs")
    busy, idle = (one, two) if one.seen()["running"] else (two, one)
    before = len(busy.seen()["seen"])
    answers = [ask(running) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(busy.seen()["seen"]) == before
    busy.stop()
    assert "engine" in slow.join().text.rsplit("data: ", 1)[-1]
    busy.start()
    wait_until(lambda: both_serve(running, one, two), "the returned engine gets requests again")
    assert idle.alive


def test_a_request_that_an_engine_takes_no_connection_for_goes_to_another(tmp_path: Path) -> None:
    # Beats ten seconds apart do not notice the loss, so that requests meet the refused connection.
    with (
        RemoteScript() as one,
        RemoteScript() as two,
        front_end(tmp_path, [one.url, two.url], heartbeat_interval_s=10) as running,
    ):
        wait_until(lambda: both_serve(running, one, two), "both engines are in the choice")
        one.stop()
        answers = [ask(running, stream=stream) for stream in (False, True) * 3]
        assert [answer.status_code for answer in answers] == [200] * 6
        two.stop()
        assert ask(running).status_code in (502, 503)
        assert ask(running).status_code == 503


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_engine_stops_readiness_fails_its_requests_and_is_back_when_it_returns(
    tmp_path: Path, harm: signal.Signals
) -> None:
    with RemoteScript() as engine, front_end(tmp_path, [engine.url]) as running:
        slow = Slow(running)
        wait_until(lambda: engine.seen()["running"] == 1, "the stream runs")
        engine.signal(harm)
        wait_until(lambda: not ready(running), "readiness stops", 5)
        refused = ask(running)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert engine.url in refused.json()["error"]["message"]
        cut = slow.join()
        assert "[DONE]" not in cut.text
        assert "error" in json.loads(cut.text.strip().rsplit("data: ", 1)[-1])
        if harm == signal.SIGSTOP:
            engine.signal(signal.SIGCONT)
        else:
            assert not engine.alive  # the front-end has not restarted what it does not own
            engine.stop()
            engine.start()
        wait_until(lambda: ready(running), "readiness returns")
        assert ask(running).status_code == 200
    assert running.process.poll() == 0


def test_the_front_end_leaves_the_engine_running_when_it_ends(tmp_path: Path) -> None:
    with RemoteScript() as engine:
        with front_end(tmp_path, [engine.url]) as running:
            assert ask(running).status_code == 200
        assert engine.alive
        assert engine.seen()["running"] == 0


def test_a_frozen_scheduler_or_other_weights_take_an_engine_out_of_service(tmp_path: Path) -> None:
    with RemoteScript() as engine, front_end(tmp_path, [engine.url]) as running:
        engine.health(alive=False)
        wait_until(lambda: not ready(running), "readiness stops", 5)
        engine.health(alive=True)
        wait_until(lambda: ready(running), "readiness returns")
        engine.stop()
        engine.report["policy_digest"] = "sha256:" + "0" * 64
        engine.start()
        wait_until(lambda: "policy_digest" in httpx.get(running.url + "/health/ready").text, "the reason is told")
        assert ask(running).status_code == 503
        engine.stop()
        engine.report["policy_digest"] = running_digest(running)
        engine.start()
        wait_until(lambda: ready(running), "the engine serves again")


def test_weights_that_a_trainer_sent_are_served_in_rollout_mode_and_not_called_the_policys(tmp_path: Path) -> None:
    with RemoteScript() as engine, front_end(tmp_path, [engine.url]) as running:
        assert ask(running).headers["x-trace-policy-digest"] == running_digest(running)
        engine.stop()
        engine.report["policy_digest"] = None
        engine.start()
        wait_until(lambda: ask(running).status_code == 200, "the engine serves again")
        assert "x-trace-policy-digest" not in ask(running).headers


def running_digest(running: Running) -> str:
    return (running.directory / "reported-digest").read_text()


def test_a_server_without_a_report_is_refused_unless_that_is_said(tmp_path: Path) -> None:
    with RemoteScript(plain=True) as engine:
        running = front_end(tmp_path, [engine.url])
        running.process.start()
        wait_until(lambda: running.process.poll() is not None, "the server ends")
        assert running.process.poll() == 3
        assert "--engine-unverified" in (tmp_path / "server.log").read_text()


def test_an_unverified_server_is_marked_and_never_made_to_generate(tmp_path: Path) -> None:
    with RemoteScript(plain=True) as engine, front_end(tmp_path, [engine.url], engine_unverified=True) as running:
        answer = ask(running)
        assert (answer.status_code, answer.headers["x-trace-engine"]) == (200, "unverified")
        assert "x-trace-policy-digest" not in answer.headers
        assert httpx.get(running.url + "/trace/report").json()["unverified"] is True
        assert ask(running, max_tokens=5000).json()["error"]["param"] == "max_tokens"
        engine.stop()
        wait_until(lambda: not ready(running), "readiness stops", 5)
        engine.start()
        wait_until(lambda: ready(running), "readiness returns")
        told = engine.seen()
        assert (told["seen"], told["health_asked"]) == ([], 0)


def test_a_gateway_before_two_engines_serves_and_its_last_engine_lost_stops_readiness(tmp_path: Path) -> None:
    smg = Path(sys.executable).with_name("smg")
    with RemoteScript(plain=True) as one, RemoteScript(plain=True) as two:
        gateway = RemoteScript()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            metrics = str(free.getsockname()[1])
        command = [str(smg), "launch", "--host", "127.0.0.1", "--port", str(gateway.port), "--prometheus-port", metrics]
        command += ["--worker-urls", one.url, two.url, "--api-key", KEY, "--policy", "round_robin"]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--log-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                with front_end(tmp_path, [gateway.url], engine_unverified=True) as running:
                    wait_until(lambda: both_serve(running, one, two), "the gateway spreads requests")
                    streamed = ask(running, "tokens=3", stream=True)
                    assert streamed.text.endswith("data: [DONE]\n\n")
                    one.stop()
                    two.stop()
                    wait_until(lambda: not ready(running), "readiness stops")
                    two.start()
                    wait_until(lambda: ready(running), "readiness returns")
                    assert ask(running).status_code == 200
            finally:
                process.terminate()
                process.wait(20)


@pytest.mark.parametrize(
    ("urls", "keys", "field"),
    [
        ("ftp://a", "k", "engine_urls"),
        ("http://a:1,http://a:1/", "k", "engine_urls"),
        ("http://a:1?x=1", "k", "engine_urls"),
        ("http://a:1,http://b:1,http://c:1", "one\ntwo", "engine_key_file"),
        ("http://a:1", None, "engine_key_file"),
    ],
)
def test_an_address_or_key_file_that_cannot_be_used_is_named(
    tmp_path: Path, urls: str, keys: str | None, field: str
) -> None:
    if keys is not None:
        (tmp_path / "keys").write_text(keys)
    settings = Settings.load(engine_urls=urls, engine_key_file=tmp_path / "keys")
    with pytest.raises(ConfigError) as refused:
        check_remote(settings)
    assert refused.value.field == field


def test_one_key_serves_all_engines_and_several_belong_to_one_each(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    settings = Settings.load(engine_urls="http://a:1/, http://b:2", engine_key_file=tmp_path / "keys")
    assert [(each.url, each.api_key) for each in remote_addresses(settings)] == [
        ("http://a:1", "one"),
        ("http://b:2", "two"),
    ]
    (tmp_path / "keys").write_text(KEY)
    assert [each.api_key for each in remote_addresses(settings)] == [KEY, KEY]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"mode": "production", "engine_urls": "http://a:1", "engine_unverified": True}, "engine_unverified"),
        ({"mode": "rollout", "engine_unverified": True}, "engine_unverified"),
        ({"mode": "rollout", "engine_urls": "http://a:1", "admin_port": 9, "admin_key": "k" * 20}, "admin_port"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_remote(Settings.load(**given))
    assert refused.value.field == field
