"""The highest rate that meets the SLO: doubled until a step misses it, then halved towards the border."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel

from trace_serve.errors import ConfigError
from trace_serve.load.report import LoadReport, Verdict

RESOLUTION = 1.05


class Step(BaseModel):
    """One run of the search."""

    rate: float
    verdict: Verdict
    requests_per_s: float
    tokens_per_s: float
    goodput: float
    missed: list[str]


class SearchResult(BaseModel):
    """Attributes:
    highest: rate of the best step that met the SLO; None when none did.
    bounded: whether a step above it missed it; else the range ended first.
    """

    schema_version: int = 1
    highest: float | None
    bounded: bool
    steps: list[Step]

    @property
    def exit_code(self) -> int:
        """0 a rate was found, 1 even the lowest missed, 2 a step was invalid."""
        if any(step.verdict is Verdict.INVALID for step in self.steps):
            return Verdict.INVALID.exit_code
        return Verdict.MISSED.exit_code if self.highest is None else Verdict.MET.exit_code


def parse_range(given: str) -> tuple[float, float]:
    """`1:64` as two rates.

    Raises:
        ConfigError: not two rising positive numbers.
    """
    try:
        low, high = (float(part) for part in given.split(":"))
    except ValueError:
        low = high = float("nan")
    if not 0 < low < high < float("inf"):
        raise ConfigError(f"--search: got {given!r}, expected LOW:HIGH in requests a second, e.g. 1:64", field="search")
    return low, high


def search(low: float, high: float, run: Callable[[float], LoadReport], report: Callable[[Step], None]) -> SearchResult:
    """Finds the border to within 5 %. An invalid step ends the search, since no step above it would be judged either.

    Args:
        run: one step at that rate.
        report: called after each step.
    """
    steps: list[Step] = []

    def met(rate: float) -> bool:
        result = run(rate)
        missed = [*result.invalid, *(check.name for check in result.checks if not check.met)]
        step = Step(
            rate=rate,
            verdict=result.verdict,
            requests_per_s=result.requests_per_s,
            tokens_per_s=result.tokens_per_s,
            goodput=result.goodput,
            missed=missed,
        )
        steps.append(step)
        report(step)
        return result.verdict is Verdict.MET

    def judged() -> bool:
        return not steps or steps[-1].verdict is not Verdict.INVALID

    best, worst, rate = None, None, low
    while worst is None and judged():
        if met(rate):
            best = rate
            if rate >= high:
                break
            rate = min(rate * 2, high)
        else:
            worst = rate
    while best is not None and worst is not None and worst / best > RESOLUTION and judged():
        rate = (best * worst) ** 0.5
        if met(rate):
            best = rate
        elif judged():
            worst = rate
    return SearchResult(highest=best, bounded=worst is not None and judged(), steps=steps)
