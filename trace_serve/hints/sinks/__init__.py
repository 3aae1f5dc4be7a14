"""Where a finished request's hints go: a hint directory, shared memory, or a URL, written behind a bounded queue.

Nothing here knows the wire format: a job brings its own encoder. `inline` hints never pass through here.
"""

from trace_serve.hints.sinks.janitor import Expired, expire, forget
from trace_serve.hints.sinks.queue import Job, Receipt, SinkEvent, SinkQueue, SinkStats
from trace_serve.hints.sinks.reader import fetch, read_shared, release
from trace_serve.hints.sinks.shared import remove_stale
from trace_serve.hints.sinks.target import AllowedTargets, Target, parse_target

__all__ = [
    "AllowedTargets",
    "Expired",
    "Job",
    "Receipt",
    "SinkEvent",
    "SinkQueue",
    "SinkStats",
    "Target",
    "expire",
    "fetch",
    "forget",
    "parse_target",
    "read_shared",
    "release",
    "remove_stale",
]
