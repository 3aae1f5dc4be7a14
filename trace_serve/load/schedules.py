"""When requests are sent: arrival times in seconds from the start, all of them known before the first one is due."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import ConfigError
from trace_serve.load.plan import LoadPlan

MAX_ARRIVALS = 10_000_000

Times = NDArray[np.float64]


def constant(rate: float, seconds: float) -> Times:
    """One arrival every 1/rate seconds, the first at 0."""
    _check(rate * seconds)
    count = max(int(np.ceil(rate * seconds - 1e-9)), 1)
    return np.arange(count, dtype=np.float64) / rate


def poisson(rate: float, seconds: float, seed: int) -> Times:
    """A Poisson process: exponential gaps of mean 1/rate, all below `seconds`. Equal seeds give equal times."""
    expected = rate * seconds
    _check(expected)
    generator = np.random.default_rng(seed)
    times = np.zeros(0)
    last = 0.0
    while last < seconds:
        more = last + np.cumsum(generator.exponential(1 / rate, size=int(expected + 4 * expected**0.5) + 16))
        times, last = np.concatenate([times, more]), float(more[-1])
    return times[times < seconds]


def replay(stamps_s: Times, speed: float, seconds: float) -> Times:
    """The arrival times of a trace, from its first one on, `speed` times faster, cut at `seconds`.

    Args:
        stamps_s: seconds, ascending.
    """
    times: Times = (stamps_s - stamps_s[0]) / speed
    return times[times < seconds]


def schedule(plan: LoadPlan, stamps_s: Times | None) -> Times:
    """The schedule of an open-loop plan.

    Args:
        stamps_s: times of the trace, for `trace`.

    Raises:
        ConfigError: nothing arrives, nothing is left to measure, or too much arrives.
    """
    if plan.arrivals == "trace":
        if stamps_s is None:
            raise ConfigError(f"--arrivals trace: {plan.trace} has no arrival times", field="arrivals")
        times = replay(stamps_s, plan.speed, plan.total_s)
    elif plan.arrivals == "poisson":
        times = poisson(plan.rate or 0.0, plan.total_s, plan.seed)
    else:
        times = constant(plan.rate or 0.0, plan.total_s)
    if not (times >= plan.warmup).any():
        raise ConfigError(
            f"--duration: got {plan.duration:g} s after a warm-up of {plan.warmup:g} s, in which nothing arrives; "
            "expected a longer time or a higher --rate",
            field="duration",
        )
    return times


def _check(expected: float) -> None:
    if expected > MAX_ARRIVALS:
        raise ConfigError(
            f"--rate: got {expected:.3g} arrivals in all, expected at most {MAX_ARRIVALS}; lower it or --duration",
            field="rate",
        )
