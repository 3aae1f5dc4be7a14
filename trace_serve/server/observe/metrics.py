"""Prometheus metrics of the front-end, all under the prefix `trace_serve_`.

Values that live elsewhere (admission, engines, hint files) are put in at scrape time by `metrics_page`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

# A second series for each counter, which says when it was made, is for OpenMetrics; in plain text it is noise.
_leave_out_created: Callable[[], None] = disable_created_metrics
_leave_out_created()

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One registry for one application, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._add_requests()
        self._add_state()
        self._add_engine()

    def _add_requests(self) -> None:
        self.requests = self._counter(
            "trace_serve_requests",
            "Requests by route, HTTP status and outcome (ok, client_gone or an error code)",
            ["route", "status", "outcome"],
        )
        self.latency = self._histogram(
            "trace_serve_request_seconds",
            "Seconds from the request's arrival to its last byte, successful requests",
            ["route"],
        )
        self.first_frame = self._histogram(
            "trace_serve_time_to_first_frame_seconds",
            "Seconds from the request's arrival to the first frame of a stream",
            ["route"],
        )
        self.per_token = self._histogram(
            "trace_serve_time_per_output_token_seconds",
            "Seconds a token after the first one, successful streams of at least two tokens that reported usage",
            ["route"],
            buckets=_TOKEN_SECONDS,
        )
        self.queue_wait = self._histogram(
            "trace_serve_queue_wait_seconds", "Seconds that an admitted request waited for a place in the engine", []
        )
        self.prompt_tokens = self._counter(
            "trace_serve_prompt_tokens", "Prompt tokens of finished requests that reported usage", []
        )
        self.completion_tokens = self._counter(
            "trace_serve_completion_tokens", "Sampled tokens of finished requests that reported usage", []
        )
        self.aborts = self._counter(
            "trace_serve_upstream_aborts",
            "Requests that the engine was told to drop before their answer was complete",
            [],
        )
        self.hint_bytes_served = self._counter(
            "trace_serve_hint_served_bytes", "Bytes of hint files that clients were given", []
        )
        self.shadow_copies = self._counter(
            "trace_serve_shadow_copies",
            "Copies of requests for a shadow: stored, dropped (too many in flight), too_large, or failed",
            ["result"],
        )
        self.request_log = self._counter(
            "trace_serve_request_log_records",
            "Records for the request log: written, dropped (queue full), too_large, or failed (redaction or disk)",
            ["result"],
        )

    def _add_state(self) -> None:
        self.in_flight = self._gauge("trace_serve_in_flight_requests", "Requests inside the engine")
        self.in_flight_limit = self._gauge("trace_serve_in_flight_limit", "Requests that may be inside the engine")
        self.tokens = self._gauge(
            "trace_serve_in_flight_tokens", "Prompt and completion tokens that requests inside the engine may use"
        )
        self.token_limit = self._gauge("trace_serve_in_flight_tokens_limit", "Tokens that may be inside the engine")
        self.tasks = self._gauge("trace_serve_event_loop_tasks", "Tasks of the server's event loop")
        self.queued = self._gauge("trace_serve_queued_requests", "Requests waiting for a place in the engine")
        self.queue_limit = self._gauge("trace_serve_queue_limit", "Requests that may wait for a place")
        self.ready = self._gauge("trace_serve_ready", "1 when requests are accepted")
        self.restarts = self._counter(
            "trace_serve_engine_restarts", "Restarts of engines after a failure, since the server started", []
        )
        self.policy = self._gauge(
            "trace_serve_policy_info",
            "Always 1; labels name the policies in service",
            ["policy", "version", "digest", "recipe_id", "verdict", "mode"],
        )
        self.verdict_expiry = self._gauge(
            "trace_serve_verdict_expiry_timestamp_seconds",
            "Unix time at which the verdict of a policy in service expires; absent without a verdict",
            ["policy"],
        )
        build = self._gauge("trace_serve_build_info", "Always 1; labels name what runs", ["version", "python"])
        build.labels(version("trace-serve"), platform.python_version()).set(1)

    def _add_engine(self) -> None:
        self.engine_running = self._gauge(
            "trace_serve_engine_running_requests",
            "Requests the active policy's scheduler runs, as it says; NaN when it cannot be asked",
        )
        self.engine_waiting = self._gauge(
            "trace_serve_engine_waiting_requests",
            "Requests the active policy's scheduler queues, as it says; NaN when it cannot be asked",
        )

    def add(self, collector: Collector) -> None:
        """Renders what `collector` yields behind the metrics of this registry."""
        self.registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(name, text, labels or [], registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: list[str], *, buckets: tuple[float, ...] = _SECONDS
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)
