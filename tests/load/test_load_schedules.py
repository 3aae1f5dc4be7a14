"""Arrival times are known in advance, and equal for equal seeds."""

from __future__ import annotations

import numpy as np
import pytest

from trace_serve.errors import ConfigError
from trace_serve.load import schedules
from trace_serve.load.plan import make_plan


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert schedules.constant(4.0, 1.5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    times = schedules.poisson(50.0, 400.0, seed=3)
    gaps = np.diff(times)
    assert times[-1] < 400
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)


def test_equal_seeds_give_equal_arrivals_and_other_seeds_others() -> None:
    first, again, other = (schedules.poisson(5.0, 20.0, seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_a_longer_run_of_one_seed_begins_like_the_shorter_one() -> None:
    short, long = schedules.poisson(5.0, 20.0, 1), schedules.poisson(5.0, 20.1, 1)
    assert long[: len(short)].tolist() == short.tolist()


def test_a_trace_begins_at_once_and_runs_at_its_speed() -> None:
    stamps = np.array([100.0, 101.0, 103.0, 160.0])
    assert schedules.replay(stamps, 2.0, 10.0).tolist() == [0.0, 0.5, 1.5]


def test_a_schedule_without_anything_to_measure_is_refused() -> None:
    plan = make_plan({"arrivals": "constant", "rate": 0.1, "warmup": 5, "duration": 1})
    with pytest.raises(ConfigError, match="nothing arrives"):
        schedules.schedule(plan, None)


def test_a_schedule_too_large_for_memory_is_refused() -> None:
    plan = make_plan({"arrivals": "poisson", "rate": 1e9, "duration": 3600})
    with pytest.raises(ConfigError, match="--rate"):
        schedules.schedule(plan, None)
