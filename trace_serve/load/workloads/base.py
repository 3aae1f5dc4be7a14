"""The interface of a workload, and what all of them put into a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_gate.queries import parse_record
from trace_serve.errors import ConfigError
from trace_serve.load.plan import LoadPlan
from trace_serve.load.schedules import Times

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Request:
    route: str
    body: dict[str, Any]


class Workload(ABC):
    """Requests by index.

    Attributes:
        stamps_s: arrival times of a trace, ascending seconds; None where there are none.
        notes: what a reader of the report should know, for example records that were left out.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self.stamps_s: Times | None = None
        self.notes: list[str] = []

    @abstractmethod
    def request(self, index: int) -> Request:
        """The request of arrival `index`; equal for equal plans."""

    def finish(self, route: str, body: dict[str, Any]) -> Request:
        """Adds the plan's sampling fields and asks for a stream that ends with usage."""
        plan = self._plan
        full = {"temperature": plan.temperature, **body, "stream": True, "stream_options": {"include_usage": True}}
        if plan.max_tokens:
            full.pop("max_completion_tokens", None)
            full["max_tokens"] = plan.max_tokens
        if plan.ignore_eos:
            full["ignore_eos"] = True
        if plan.model:
            full["model"] = plan.model
        if plan.hints != "off":
            full["trace_hints"] = True
        return Request(route, full)


def records(path: Path, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of every line of a JSONL file that is not empty.

    Raises:
        ConfigError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as exc:
        raise ConfigError(f"--{flag}: {path} cannot be read: {exc.strerror or exc}", field=flag) from exc
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, parse_record(line, place)
