from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import scripted_engine
from exposition import families, faults, page, value
from harness import Running
from prometheus_client import CollectorRegistry, generate_latest

from trace_serve.server.observe.engine_metrics import MAX_BYTES, EngineCollector, EngineName, EngineSample, merge

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
POLICY = "scripted@1"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("metrics"), max_in_flight=1, max_queue=0) as running:
        yield running


@pytest.fixture
def engine(running: Running) -> Iterator[Running]:
    """The engine's own metrics, put back afterwards."""
    yield running
    running.set_health(metrics=scripted_engine.METRICS, metrics_delay=0.0, metrics_times=1)


def ask(running: Running, words: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": words}], **fields}
    return httpx.post(running.url + CHAT, json=body, timeout=20)


def until(check: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.05)


def test_every_metric_has_a_type_help_and_a_name_by_the_conventions(running: Running) -> None:
    ask(running, "tokens=3", stream=True)
    found = families(page(running.url))
    ours = [family for name, family in found.items() if not name.startswith("sglang:")]
    assert {"trace_serve_requests", "trace_serve_engine_metrics_up", "process_open_fds"} <= set(found)
    assert all(family.type in ("counter", "gauge", "histogram") for family in ours)
    assert faults(ours) == []


def test_the_rules_find_bad_names() -> None:
    text = (
        "# HELP a_total x\n# TYPE a_total gauge\na_total 1\n"
        "# HELP a_milliseconds x\n# TYPE a_milliseconds gauge\na_milliseconds 1\n"
        "# TYPE a_gauge gauge\na_gauge 1\n"
    )
    said = " ".join(faults(families(text).values()))
    for fault in ("_total is for counters", "no base unit", "no help text", "is a type"):
        assert fault in said


def test_engine_metrics_keep_their_names_and_say_which_policy(running: Running) -> None:
    text = page(running.url)
    labels = {"policy": POLICY, "engine": "local", "model_name": "scripted-model", "tp_rank": "0"}
    assert value(text, "sglang:num_running_reqs", **labels) == 3.0
    assert value(text, "sglang:generation_tokens_total", policy=POLICY) == 17.0
    assert value(text, "trace_serve_engine_metrics_up", policy=POLICY) == 1.0
    assert families(text)["sglang:num_running_reqs"].documentation == "The number of running requests."


def test_several_engines_of_one_policy_stay_apart() -> None:
    engines = EngineCollector()
    engines.samples = tuple(
        EngineSample(EngineName(POLICY, name), scripted_engine.METRICS, report={"weights": {"version": number}})
        for number, name in enumerate(("10.0.0.1:30000", "10.0.0.2:30000"))
    )
    registry = CollectorRegistry()
    registry.register(engines)
    text = generate_latest(registry).decode()
    (running,) = [family for name, family in families(text).items() if name == "sglang:num_running_reqs"]
    assert [sample.labels["engine"] for sample in running.samples] == ["10.0.0.1:30000", "10.0.0.2:30000"]
    assert value(text, "trace_serve_weight_version", policy=POLICY, engine="10.0.0.2:30000") == 1.0


def test_a_type_that_two_engines_disagree_about_is_the_first_ones() -> None:
    other = scripted_engine.METRICS.replace("reqs gauge", "reqs counter")
    names = [EngineName(POLICY, "a"), EngineName(POLICY, "b")]
    merged, unreadable = merge(
        [EngineSample(name, text) for name, text in zip(names, (scripted_engine.METRICS, other), strict=True)]
    )
    assert unreadable == {names[1]}
    assert {family.name: family.type for family in merged}["sglang:num_running_reqs"] == "gauge"


def test_an_engine_cannot_write_into_the_front_ends_own_metrics(running: Running) -> None:
    assert value(page(running.url), "trace_serve_ready") == 1.0


@pytest.mark.parametrize(
    ("nonsense", "times"),
    [
        ("sglang:x{ 1\n", 1),
        ("# TYPE sglang:x gauge\nsglang:x not-a-number\n", 1),
        ("<html>\x00</html>", 1),
        ("sglang:x 1\n", MAX_BYTES // 10),
    ],
    ids=["unclosed", "not a number", "html", "larger than the limit"],
)
def test_engine_metrics_that_cannot_be_read_cost_only_themselves(engine: Running, nonsense: str, times: int) -> None:
    engine.set_health(metrics=nonsense, metrics_times=times)
    text = page(engine.url)
    assert value(text, "trace_serve_engine_metrics_up", policy=POLICY) == 0.0
    assert value(text, "trace_serve_ready") == 1.0
    assert not any(name.startswith("sglang:") for name in families(text))


def test_a_slow_engine_holds_a_scrape_up_for_a_second_and_no_longer(engine: Running) -> None:
    engine.set_health(metrics_delay=60)
    text = page(engine.url)  # gives up long before the engine would answer
    assert value(text, "trace_serve_engine_metrics_up", policy=POLICY) == 0.0
    assert value(text, "trace_serve_engine_running_requests") == 0.0


def test_a_dead_engine_never_breaks_the_scrape(running: Running) -> None:
    before = value(page(running.url), "trace_serve_engine_restarts_total")
    pid = running.engine()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert families(page(running.url))
    finally:
        os.kill(pid, signal.SIGKILL)
    until(lambda: value(page(running.url), "trace_serve_ready") == 0.0 or running.engine()["pid"] != pid)
    until(lambda: running.engine()["pid"] != pid and value(page(running.url), "trace_serve_ready") == 1.0)
    assert value(page(running.url), "trace_serve_engine_restarts_total") == (before or 0) + 1


def test_the_engines_report_becomes_counters_of_hints_weights_and_incidents(engine: Running) -> None:
    engine.set_health(
        report={
            "hint_files": {"written": 5, "bytes": 1234, "failed": 1, "dropped": 2, "expired": 3, "pending": 4},
            "incidents": {"nonfinite": 0, "saturated": 9},
            "weights": {"version": 7, "session_open": True, "quarantined": "half an update", "mixed_requests": 2},
        }
    )
    text = page(engine.url)
    for result, count in (("written", 5), ("failed", 1), ("dropped", 2), ("expired", 3)):
        assert value(text, "trace_serve_hint_files_total", policy=POLICY, result=result) == count
    assert value(text, "trace_serve_hint_written_bytes_total", policy=POLICY) == 1234
    assert value(text, "trace_serve_hints_pending", policy=POLICY) == 4
    assert value(text, "trace_serve_engine_incidents_total", policy=POLICY, kind="saturated") == 9
    assert value(text, "trace_serve_weight_version", policy=POLICY) == 7
    assert value(text, "trace_serve_weight_update_open", policy=POLICY) == 1
    assert value(text, "trace_serve_engine_quarantined", policy=POLICY) == 1
    assert value(text, "trace_serve_mixed_weight_requests_total", policy=POLICY) == 2


def test_requests_are_counted_by_route_status_and_outcome(running: Running) -> None:
    def count(route: str, status: str, outcome: str) -> float:
        labels = {"route": route, "status": status, "outcome": outcome}
        return value(page(running.url), "trace_serve_requests_total", **labels) or 0.0

    expected = [
        (CHAT, "200", "ok"),
        (CHAT, "400", "unknown_field"),
        (CHAT, "502", "generation_failed"),
        ("/v1/models", "200", "ok"),
        ("unknown", "404", "refused"),
    ]
    before = [count(*labels) for labels in expected]
    assert ask(running, "tokens=1").status_code == 200
    assert ask(running, "tokens=1", no_such_field=1).status_code == 400
    assert ask(running, "abort=1").status_code == 502
    assert httpx.get(running.url + "/v1/models").status_code == 200
    for path in ("/wp-admin", "/.env"):
        assert httpx.get(running.url + path).status_code == 404
    assert [count(*labels) - was for labels, was in zip(expected, before, strict=True)] == [1, 1, 1, 1, 2]
    assert "wp-admin" not in page(running.url)


def test_a_full_server_and_an_abort_are_counted(running: Running) -> None:
    def total(name: str, **labels: str) -> float:
        return value(page(running.url), name, **labels) or 0.0

    refused = {"route": CHAT, "status": "503", "outcome": "queue_full"}
    aborts, full = total("trace_serve_upstream_aborts_total"), total("trace_serve_requests_total", **refused)
    body = {"messages": [{"role": "user", "content": "hang=1"}]}
    with httpx.Client(timeout=60) as client:
        sender = subprocess.Popen([sys.executable, "-c", _HANGING, running.url + CHAT])
        try:
            until(lambda: running.seen()["running"] == 1)
            assert client.post(running.url + CHAT, json=body).status_code == 503
            assert total("trace_serve_in_flight_requests") == total("trace_serve_in_flight_limit") == 1
        finally:
            sender.kill()
            sender.wait()
    until(lambda: total("trace_serve_upstream_aborts_total") == aborts + 1)
    assert total("trace_serve_requests_total", **refused) == full + 1


_HANGING = """
import sys, httpx
httpx.post(sys.argv[1], json={"messages": [{"role": "user", "content": "hang=1"}]}, timeout=60)
"""


def test_tokens_and_their_times_are_counted(running: Running) -> None:
    def total(name: str, **labels: str) -> float:
        return value(page(running.url), name, **labels) or 0.0

    sampled, streams = "trace_serve_completion_tokens_total", "trace_serve_time_per_output_token_seconds_count"
    before, timed = total(sampled), total(streams, route=CHAT)
    answer = ask(running, "tokens=5", stream=True, stream_options={"include_usage": True})
    assert answer.text.rstrip().endswith("[DONE]")
    until(lambda: total(streams, route=CHAT) == timed + 1)
    assert total(sampled) == before + 5
    assert total("trace_serve_queue_wait_seconds_count") > 0


def test_build_and_policy_are_named(running: Running) -> None:
    text = page(running.url)
    assert value(text, "trace_serve_build_info", version=_version(), python=sys.version.split()[0]) == 1.0
    assert value(text, "trace_serve_policy_info", policy="scripted", version="1", verdict="sha256:verdict") == 1.0


def _version() -> str:
    from importlib.metadata import version

    return version("trace-serve")
