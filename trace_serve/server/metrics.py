"""Prometheus metrics of the front-end, all under the prefix `trace_serve_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One registry for one application, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "trace_serve_requests",
            "Requests by route, HTTP status and outcome (ok, client_gone or an error code)",
            ["route", "status", "outcome"],
            registry=self.registry,
        )
        self.latency = Histogram(
            "trace_serve_request_seconds",
            "Seconds from the request's arrival to its last byte, successful requests",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_frame = Histogram(
            "trace_serve_time_to_first_frame_seconds",
            "Seconds from the request's arrival to the first frame of a stream",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "trace_serve_prompt_tokens",
            "Prompt tokens of finished requests that reported usage",
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "trace_serve_completion_tokens",
            "Sampled tokens of finished requests that reported usage",
            registry=self.registry,
        )
        self.in_flight = self._gauge("trace_serve_in_flight_requests", "Requests inside the engine")
        self.queued = self._gauge("trace_serve_queued_requests", "Requests waiting for a place in the engine")
        self.ready = self._gauge("trace_serve_ready", "1 when requests are accepted")
        self.restarts = self._gauge("trace_serve_engine_restarts", "Restarts of the engine since the server started")
        self.engine_running = self._gauge(
            "trace_serve_engine_running_requests",
            "Requests the scheduler runs, as it says; NaN when it cannot be asked",
        )
        self.engine_waiting = self._gauge(
            "trace_serve_engine_waiting_requests",
            "Requests the scheduler queues, as it says; NaN when it cannot be asked",
        )
        self.policy = Gauge(
            "trace_serve_policy_info",
            "Always 1; labels name the policy in service",
            ["policy", "version", "digest", "recipe_id", "verdict", "mode"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)
