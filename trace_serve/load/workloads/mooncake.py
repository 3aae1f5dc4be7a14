"""Traces in the format of Mooncake (FAST'25), one request a line:

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}

A hash id stands for a block of 512 prompt tokens; requests that begin with the same ids share that prefix. The trace
has no texts, so that each id becomes a block of words of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from trace_serve.errors import ConfigError
from trace_serve.load.plan import LoadPlan
from trace_serve.load.workloads.base import CHAT, Request, Workload, records
from trace_serve.load.workloads.words import text

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class _Record:
    stamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Mooncake(Workload):
    """`--length-scale` shrinks inputs, outputs and blocks alike, for an engine of a shorter context."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(plan)
        assert plan.trace is not None
        found = [_record(place, raw) for place, raw in records(plan.trace, "trace")]
        if not found:
            raise ConfigError(f"--trace: {plan.trace} has no requests in it", field="trace")
        self._records = sorted(found, key=lambda each: each.stamp_s)
        self.stamps_s = np.array([each.stamp_s for each in self._records])
        self._block = max(round(BLOCK_TOKENS * plan.length_scale), 1)
        self._words = lru_cache(maxsize=4096)(lambda block: text([plan.seed, 6, block], self._block))

    def request(self, index: int) -> Request:
        record, scale = self._records[index % len(self._records)], self._plan.length_scale
        length = max(round(record.input_length * scale), 1)
        words: list[str] = []
        for block in record.hash_ids:
            words += self._words(block).split(" ")
        if len(words) < length:
            words += text([self._plan.seed, 7, index], length - len(words)).split(" ")
        messages = [{"role": "user", "content": " ".join(words[:length])}]
        return self.finish(CHAT, {"messages": messages, "max_tokens": max(round(record.output_length * scale), 1)})


def _record(place: str, raw: dict[str, Any]) -> _Record:
    for name in ("timestamp", "input_length", "output_length"):
        value = raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{place}: {name}: got {value!r}, expected a number of at least 0", field=name)
    ids = raw.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(f"{place}: hash_ids: expected a list of whole numbers", field="hash_ids")
    return _Record(raw["timestamp"] / 1000, int(raw["input_length"]), int(raw["output_length"]), tuple(ids))
