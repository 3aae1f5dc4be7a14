"""Chat from gate queries: a shipped suite, or a file of records with `messages` or `prompt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eval_gate import suites
from trace_serve.errors import ConfigError
from trace_serve.load.plan import LoadPlan
from trace_serve.load.workloads.base import CHAT, Request, Workload, records

DEFAULT_MAX_TOKENS = 64


class Chat(Workload):
    """Goes through the queries in a seeded order, and again when they are used up."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(plan)
        given = Path(plan.queries)
        path = given if given.suffix or given.exists() else suites.path(plan.queries)
        self._queries = [_query(place, record) for place, record in records(path, "queries")]
        if not self._queries:
            raise ConfigError(f"--queries: {path} has no queries in it", field="queries")
        self._order = np.random.default_rng([plan.seed, 1]).permutation(len(self._queries))

    def request(self, index: int) -> Request:
        return self.finish(CHAT, self._queries[int(self._order[index % len(self._order)])])


def _query(place: str, record: dict[str, Any]) -> dict[str, Any]:
    messages = record.get("messages")
    if messages is None and isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: expected messages, or a prompt that is a text", field="queries")
    return {"messages": messages, "max_tokens": record.get("max_tokens", DEFAULT_MAX_TOKENS)}
