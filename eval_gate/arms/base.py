"""What every kind of arm can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from eval_gate.arms.evidence import EngineReport
from eval_gate.arms.records import Failure


@dataclass(frozen=True)
class Exchange:
    """What came of one request, retries included; `failure` is None exactly when `text` is set."""

    response: Any
    text: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_s: float | None
    attempts: int
    failure: Failure | None


def unanswered(failure: Failure, attempts: int = 0, latency_s: float | None = None, response: Any = None) -> Exchange:
    """An exchange that brought no answer."""
    return Exchange(response, None, None, None, None, latency_s, attempts, failure)


class Arm(Protocol):
    """One version, ready to answer."""

    model: str
    """Served name, sent with each request; it says nothing about what answers."""

    root: str | None
    """Path or name of what is served, as the server says; None when it does not say."""

    async def report(self) -> EngineReport | None:
        """What is loaded, as the arm itself says; None when it does not say.

        Raises:
            EngineError: the arm cannot be reached, or its report is not one.
        """

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Token ids of the rendered prompt of a request; None when the arm cannot tell."""

    async def complete(self, body: dict[str, Any]) -> Exchange:
        """Answers one request body. Never raises for a bad answer."""
