"""Spans and metrics by the OpenTelemetry semantic conventions for generative AI, sent as OTLP over HTTP.

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/ (spans, and the metrics of a model server). No prompt
and no answer is ever recorded. `gen_ai.client.token.usage` is left to clients, which would be counted twice otherwise;
the token counts of a request are on its span. Sampling, batching, headers and time-outs follow the standard OTEL_
variables.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trace_serve.server.observe.telemetry import Ended, forwarded

SCOPE = "trace_serve.server"
PROVIDER = "trace_serve"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}

DURATION = "gen_ai.server.request.duration"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
PER_TOKEN = "gen_ai.server.time_per_output_token"
# The boundaries that the conventions recommend for each.
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

Attributes = dict[str, str | int | float | bool]


class OtelTelemetry:
    """Private providers, so that nothing else in the process is traced by accident.

    Args:
        endpoint: base URL of the collector, to which `/v1/traces` and `/v1/metrics` are added; None takes the
            standard variables.
        host, port: the address served, as `server.address` and `server.port`; port 0 is left out.
        traces, metrics: which of the two are sent.
    """

    def __init__(self, endpoint: str | None, *, host: str, port: int, traces: bool, metrics: bool) -> None:
        base = None if endpoint is None else endpoint.rstrip("/")
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what is given here only where they are set.
        resource = Resource({"service.name": "trace-serve", "service.version": version("trace-serve")}).merge(
            _from_environment()
        )
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        if traces:
            spans = OTLPSpanExporter(endpoint=None if base is None else f"{base}/v1/traces")
            self._traces.add_span_processor(BatchSpanProcessor(spans))
        readers = []
        if metrics:
            points = OTLPMetricExporter(endpoint=None if base is None else f"{base}/v1/metrics")
            readers.append(PeriodicExportingMetricReader(points))
        self._meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer(SCOPE, version("trace-serve"))
        meter = self._meters.get_meter(SCOPE, version("trace-serve"))
        self.duration = meter.create_histogram(
            DURATION,
            unit="s",
            description="Generative AI server request duration such as time-to-last byte or last output token.",
            explicit_bucket_boundaries_advisory=_DURATION_S,
        )
        self.first_token = meter.create_histogram(
            FIRST_TOKEN,
            unit="s",
            description="Time to generate first token for successful responses.",
            explicit_bucket_boundaries_advisory=_FIRST_S,
        )
        self.per_token = meter.create_histogram(
            PER_TOKEN,
            unit="s",
            description="Time per output token generated after the first token for successful responses.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN_S,
        )
        self._server: Attributes = {"server.address": host}
        if port:
            self._server["server.port"] = port
        self._propagator = TraceContextTextMapPropagator()

    def request(self, request_id: str, route: str, headers: Mapping[str, str]) -> OtelRequestSpan:
        """Begins the server span of one request, as a child of the client's if that sent a `traceparent`."""
        operation = OPERATIONS.get(route, route)
        common: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            **self._server,
        }
        parent = self._propagator.extract(forwarded(headers), context=Context())
        span = self._tracer.start_span(
            operation,
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                **common,
                "http.request.method": "POST",
                "http.route": route,
                "gen_ai.response.id": request_id,
            },
        )
        return OtelRequestSpan(self, span, operation, common, self._propagator)

    def close(self, timeout_s: float) -> None:
        """Sends what waits; a collector that does not answer costs no more than `timeout_s`."""

        def send() -> None:
            self._traces.shutdown()
            self._meters.shutdown(timeout_millis=timeout_s * 1000)

        sending = threading.Thread(target=send, name="otel-close", daemon=True)
        sending.start()
        sending.join(timeout_s)


class OtelRequestSpan:
    """One request: its span, and the metrics once it has ended. Not thread-safe; `end` is called once."""

    def __init__(
        self,
        telemetry: OtelTelemetry,
        span: Span,
        operation: str,
        common: Attributes,
        propagator: TraceContextTextMapPropagator,
    ) -> None:
        self._telemetry = telemetry
        self._span = span
        self._operation = operation
        self._common = common
        self._propagator = propagator

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(self._span, Context()))
        return carrier

    def set(self, name: str, value: str | int | float | bool) -> None:
        self._span.set_attribute(name, value)

    def describe(self, model: str, attributes: Mapping[str, str | int | float | bool]) -> None:
        self._common["gen_ai.request.model"] = model
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes({"gen_ai.request.model": model, **attributes})

    def end(self, ended: Ended) -> None:
        span, usage = self._span, ended.usage or {}
        # Set in one call: each one takes the span's lock.
        said: dict[str, str | int | float | tuple[str, ...]] = {"http.response.status_code": ended.status}
        for name, key in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
            if isinstance(usage.get(key), int):
                said[f"gen_ai.usage.{name}"] = usage[key]
        if ended.finish_reasons:
            said["gen_ai.response.finish_reasons"] = ended.finish_reasons
        if ended.first_s is not None:
            said["gen_ai.response.time_to_first_chunk"] = ended.first_s
        attributes = dict(self._common)
        if ended.outcome != "ok":
            attributes["error.type"] = ended.outcome
            said["error.type"] = ended.outcome
            # A refused request is the client's error, by the conventions for HTTP servers; a stream that broke is ours.
            if ended.status >= 500 or (ended.status == 200 and ended.outcome != "client_gone"):
                span.set_status(StatusCode.ERROR, ended.outcome)
        span.set_attributes(said)
        span.end()
        self._record(ended, attributes, usage)

    def _record(self, ended: Ended, attributes: Attributes, usage: Mapping[str, object]) -> None:
        telemetry = self._telemetry
        telemetry.duration.record(ended.total_s, attributes)
        if ended.outcome != "ok" or ended.first_s is None:
            return
        telemetry.first_token.record(ended.first_s, attributes)
        tokens = usage.get("completion_tokens")
        if isinstance(tokens, int) and tokens > 1:
            telemetry.per_token.record((ended.total_s - ended.first_s) / (tokens - 1), attributes)


def _from_environment() -> Resource:
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, and the SDK's own name."""
    found = Resource.create()
    unnamed = str(found.attributes.get("service.name")).startswith("unknown_service")
    named = {name: value for name, value in found.attributes.items() if not (unnamed and name == "service.name")}
    return Resource(named, found.schema_url)
