"""An OTLP/HTTP collector in a process of its own: parses what it gets and writes one JSON line a span or data point.

`python otlp_receiver.py OUT` prints its port. Nothing of the server under test is imported here.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


class Receiver:
    """Starts the process and reads what it wrote."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Receiver:
        self._out.touch()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._out)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def got(self, kind: str) -> list[dict[str, Any]]:
        lines = self._out.read_text().splitlines()
        return [each for line in lines if (each := json.loads(line))["kind"] == kind]

    def text(self) -> str:
        return self._out.read_text()

    def wait_for(self, kind: str, check: Callable[[dict[str, Any]], bool], limit_s: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while True:
            found = [each for each in self.got(kind) if check(each)]
            if found:
                return found[-1]
            assert time.monotonic() < deadline, f"no such {kind} within {limit_s} s: {self.text()[-2000:]}"
            time.sleep(0.05)


def main() -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                lines = _spans(ExportTraceServiceRequest.FromString(body))
            else:
                assert self.path == "/v1/metrics", self.path
                lines = _points(ExportMetricsServiceRequest.FromString(body))
            with Path(sys.argv[1]).open("a") as out:
                out.write("".join(json.dumps(line) + "\n" for line in lines))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def _spans(request: Any) -> list[dict[str, Any]]:
    return [
        {
            "kind": "span",
            "resource": _attributes(resource.resource.attributes),
            "name": span.name,
            "span_kind": span.kind,
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_id": span.parent_span_id.hex(),
            "status": span.status.code,
            "attributes": _attributes(span.attributes),
            "events": len(span.events),
            "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        }
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _points(request: Any) -> list[dict[str, Any]]:
    return [
        {
            "kind": "point",
            "name": metric.name,
            "unit": metric.unit,
            "count": point.count,
            "sum": point.sum,
            "bounds": list(point.explicit_bounds),
            "attributes": _attributes(point.attributes),
        }
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.histogram.data_points
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


if __name__ == "__main__":
    main()
