"""Replays the front-end's request log: the same bodies on the same routes, in its order and, if wished, its rhythm."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np

from trace_serve.errors import ConfigError
from trace_serve.load.plan import LoadPlan
from trace_serve.load.workloads.base import CHAT, COMPLETIONS, Request, Workload, records

_OF_THE_RUN = ("rid", "stream", "stream_options", "user", "metadata")
"""Fields that the run sets itself, or labels of the original sender."""


class RequestLog(Workload):
    """Every record that was answered with 200; its `model` is left out unless the plan names one.

    Arrival times are the records' `time`, which is when an answer ended. Records with several choices (`n`) are kept.
    """

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(plan)
        assert plan.trace is not None
        found: list[tuple[float, Request]] = []
        left_out, timed = 0, True
        for place, record in records(plan.trace, "trace"):
            if record.get("schema_version") != 1:
                raise ConfigError(
                    f"{place}: schema_version {record.get('schema_version')!r}, expected 1", field="schema_version"
                )
            route, body = record.get("route"), record.get("request")
            if record.get("status") != 200 or route not in (CHAT, COMPLETIONS) or not isinstance(body, dict):
                left_out += 1
                continue
            if body.get("messages", body.get("prompt")) is None:  # redaction takes prompts of token ids away
                left_out += 1
                continue
            stamp = _stamp(record.get("time"))
            timed = timed and stamp is not None
            kept = {name: value for name, value in body.items() if name not in _OF_THE_RUN and name != "model"}
            found.append((stamp or 0.0, self.finish(route, kept)))
        if not found:
            raise ConfigError(f"--trace: {plan.trace} has no request that was answered with 200", field="trace")
        if timed:
            found.sort(key=lambda each: each[0])
            self.stamps_s = np.array([stamp for stamp, _ in found])
        self._requests = [request for _, request in found]
        if left_out:
            self.notes.append(f"{left_out} of {left_out + len(found)} records of the log cannot be replayed")

    def request(self, index: int) -> Request:
        return self._requests[index % len(self._requests)]


def _stamp(given: Any) -> float | None:
    try:
        return datetime.fromisoformat(given).timestamp()
    except (TypeError, ValueError):
        return None
