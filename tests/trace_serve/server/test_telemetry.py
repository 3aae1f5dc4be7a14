from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Running
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from otlp_receiver import Receiver

from trace_serve.errors import ConfigError
from trace_serve.server.observe.telemetry import forwarded, open_telemetry
from trace_serve.settings import Settings

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SERVER_SPAN, ERROR = 2, 2
PROMPT = "tokens=3 a secret plan"
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}


class Traced(Running):
    """A front-end that exports quickly, and the collector that it exports to."""

    def __init__(self, directory: Path, receiver: Receiver, **settings: object) -> None:
        super().__init__(directory, otel_endpoint=receiver.url, **settings)
        self.process._environment.update(FAST)
        self.receiver = receiver

    def span_of(self, answer: httpx.Response) -> dict[str, Any]:
        rid = answer.headers["x-request-id"]
        return self.receiver.wait_for("span", lambda span: span["attributes"].get("gen_ai.response.id") == rid)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with (
        Receiver(tmp_path_factory.mktemp("collector") / "received.jsonl") as receiver,
        Traced(tmp_path_factory.mktemp("traced"), receiver) as running,
    ):
        yield running


def ask(
    running: Running, words: str = PROMPT, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": words}], **fields}
    return httpx.post(running.url + CHAT, json=body, headers=headers, timeout=20)


def test_a_request_is_one_server_span_with_the_genai_attributes(traced: Traced) -> None:
    answer = ask(traced, max_tokens=8)
    span = traced.span_of(answer)
    assert span["name"] == "chat scripted"
    assert span["span_kind"] == SERVER_SPAN
    assert span["status"] == 0
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trace_serve",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted@1",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "http.response.status_code": 200,
        "http.route": CHAT,
        "server.address": "127.0.0.1",
        "server.port": traced.process.port,
        "trace_serve.policy.digest": answer.headers["x-trace-policy-digest"],
    }
    assert {name: span["attributes"].get(name) for name in wanted} == wanted
    assert span["attributes"]["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert answer.json()["id"] == span["attributes"]["gen_ai.response.id"]
    assert span["resource"]["service.name"] == "trace-serve"
    assert span["resource"]["service.version"]
    assert "error.type" not in span["attributes"]


def test_names_are_those_of_the_conventions(traced: Traced) -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    known |= {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_")}
    ask(traced, stream=True, stream_options={"include_usage": True})
    traced.receiver.wait_for("point", lambda point: point["name"] == "gen_ai.server.time_per_output_token")
    used = {name for span in traced.receiver.got("span") for name in span["attributes"]}
    used |= {name for point in traced.receiver.got("point") for name in (point["name"], *point["attributes"])}
    ours = {name for name in used if name.startswith("gen_ai.")}
    assert len(ours) >= 12
    assert ours <= known


def test_a_stream_has_its_finish_reason_and_time_to_the_first_chunk(traced: Traced) -> None:
    answer = ask(traced, "tokens=4 bytewise=1", stream=True, stream_options={"include_usage": True})
    span = traced.span_of(answer)
    assert span["attributes"]["gen_ai.response.finish_reasons"] == ["stop"]
    assert span["attributes"]["gen_ai.usage.output_tokens"] == 4
    assert span["attributes"]["gen_ai.request.stream"] is True
    assert 0 < span["attributes"]["gen_ai.response.time_to_first_chunk"] <= span["seconds"]


def test_a_clients_trace_goes_on_through_the_engine(traced: Traced) -> None:
    answer = ask(traced, headers={"traceparent": PARENT, "tracestate": "vendor=1"})
    span = traced.span_of(answer)
    assert (span["trace_id"], span["parent_id"]) == (PARENT.split("-")[1], PARENT.split("-")[2])
    sent = traced.seen()["trace_headers"]
    assert sent == {"traceparent": f"00-{span['trace_id']}-{span['span_id']}-01", "tracestate": "vendor=1"}
    line = next(line for line in traced.log() if line.get("request_id") == answer.headers["x-request-id"])
    assert line["trace_id"] == span["trace_id"]


@pytest.mark.parametrize("parent", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", PARENT[:-3]])
def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(traced: Traced, parent: str) -> None:
    span = traced.span_of(ask(traced, headers={"traceparent": parent}))
    assert span["parent_id"] == ""
    assert set(span["trace_id"]) != {"0"}


def test_a_failure_names_its_error_and_a_refusal_is_not_the_servers(traced: Traced) -> None:
    failed = traced.span_of(ask(traced, "abort=1"))
    assert failed["attributes"]["error.type"] == "generation_failed"
    assert failed["status"] == ERROR
    refused = traced.span_of(ask(traced, temperature=9))
    assert refused["attributes"]["error.type"] == "invalid_value"
    assert refused["attributes"]["http.response.status_code"] == 400
    assert refused["status"] == 0
    broken = traced.span_of(ask(traced, "tokens=3 cut_after=1", stream=True))
    assert broken["attributes"]["error.type"] == "answer_cut"
    assert broken["status"] == ERROR


def test_the_metrics_of_a_model_server_are_exported(traced: Traced) -> None:
    ask(traced, "tokens=5", stream=True, stream_options={"include_usage": True})
    for name, first_bound in (
        ("gen_ai.server.request.duration", 0.01),
        ("gen_ai.server.time_to_first_token", 0.001),
        ("gen_ai.server.time_per_output_token", 0.01),
    ):
        point = traced.receiver.wait_for(
            "point", lambda point, name=name: point["name"] == name and "error.type" not in point["attributes"]
        )
        assert point["unit"] == "s"
        assert point["bounds"][0] == first_bound
        assert point["count"] >= 1
        assert point["sum"] > 0
        assert point["attributes"]["gen_ai.request.model"] == "scripted"
        assert point["attributes"]["gen_ai.operation.name"] == "chat"
    ask(traced, "abort=1")
    traced.receiver.wait_for("point", lambda point: point["attributes"].get("error.type") == "generation_failed")


def test_no_prompt_and_no_answer_is_exported(traced: Traced) -> None:
    answer = ask(traced, PROMPT)
    traced.span_of(answer)
    text = traced.receiver.text()
    assert "secret plan" not in text
    assert answer.json()["choices"][0]["message"]["content"][:3] not in text


def test_what_waits_is_sent_when_the_server_stops(tmp_path: Path) -> None:
    with Receiver(tmp_path / "received.jsonl") as receiver:
        slow = Traced(tmp_path, receiver)
        slow.process._environment["OTEL_BSP_SCHEDULE_DELAY"] = "600000"
        with slow as running:
            rid = ask(running).headers["x-request-id"]
        receiver.wait_for("span", lambda span: span["attributes"].get("gen_ai.response.id") == rid)


def test_a_collector_that_is_not_there_costs_no_request(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "nothing.jsonl")
    receiver.url = "http://127.0.0.1:9"
    with Traced(tmp_path, receiver) as running:
        assert [ask(running).status_code for _ in range(3)] == [200] * 3
        assert running.process.stop() == 0


def test_without_an_endpoint_neither_the_sdk_nor_an_exporter_is_imported() -> None:
    code = (
        "import sys; import trace_serve.server.app; from trace_serve.settings import Settings\n"
        "from trace_serve.server.observe.metrics import Metrics\n"
        "from trace_serve.server.observe.observation import Observers\n"
        "assert Observers(Settings(), Metrics()).telemetry is None\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto', 'google.protobuf', 'requests',"
        " 'eval_gate.redaction', 'trace_serve.server.observe.otel')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACE_SERVE_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=True)
    assert done.stdout.strip() == "[]"


def test_a_front_end_outside_the_trace_passes_the_clients_headers_on(shared: Running, client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "tokens=1"}]}
    assert client.post(CHAT, json=body, headers={"traceparent": PARENT}).status_code == 200
    assert shared.seen()["trace_headers"] == {"traceparent": PARENT}


@pytest.mark.parametrize("parent", ["", "00-abc", PARENT.upper(), PARENT + "\r\nx: y"])
def test_only_trace_headers_that_are_well_formed_are_passed_on(parent: str) -> None:
    assert forwarded({"traceparent": parent, "tracestate": "a=1"}) == {}
    assert forwarded({"traceparent": PARENT, "tracestate": "a\nb"}) == {"traceparent": PARENT}


def test_telemetry_is_off_by_default_and_when_the_sdk_is_disabled() -> None:
    assert open_telemetry(Settings(), {}) is None
    on = Settings(otel_endpoint="http://127.0.0.1:4318")
    assert open_telemetry(on, {"OTEL_SDK_DISABLED": "true"}) is None


def test_a_protocol_that_is_not_built_in_is_refused() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(ConfigError, match=r"got 'grpc', expected 'http/protobuf'"):
        open_telemetry(Settings(), environment)


def test_a_missing_extra_stops_a_server_that_was_told_to_export_and_warns_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == "trace_serve.server.observe.otel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'trace-serve\[otel\]'"):
        open_telemetry(Settings(otel_endpoint="http://127.0.0.1:4318"), {})
    assert open_telemetry(Settings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}) is None
    assert "otel_not_installed" in capsys.readouterr().out
