"""The GRPO example end to end: a tiny policy, the real engine, a few updates."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engine_client import START_TIMEOUT_S
from learner import Learner
from loop import Arm, Options, is_complete, read_metrics
from rollouts import HINTS, Sampler
from transformers import AutoTokenizer

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.policy.manifest import Policy

pytestmark = pytest.mark.engine

# Steps this large would be a distance of their own, were the engine not told the new weights each time.
OPTIONS = Options(steps=3, prompts=2, group=4, tokens=12, layers=2, learning_rate=1e-2)


@dataclass(frozen=True)
class Checksum:
    """Random weights say nothing that a task would reward."""

    prompt: str

    def reward(self, answer: str, ended: bool) -> float:
        return zlib.crc32(answer.encode()) % 7 / 7


PROBLEMS = [Checksum("one"), Checksum("two")]


@pytest.fixture(scope="module")
def engine(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    config = EngineConfig(
        model=fp4_policy.path,
        recipe=fp4_policy.recipe,
        log_path=tmp_path_factory.mktemp("grpo") / "engine.log",
        max_total_tokens=4096,
        hints=HINTS,
        partial_refit=True,
    )
    with EngineProcess(config) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running


def run_arm(engine: EngineProcess, policy: Policy, path: Path, arm: str, options: Options) -> list[dict[str, Any]]:
    sampler = Sampler(engine, AutoTokenizer.from_pretrained(policy.path), options.tokens)
    learner = Learner(policy.path, policy.recipe, arm, layers=options.layers, learning_rate=options.learning_rate)
    told: list[dict[str, Any]] = []
    Arm(path, learner, sampler, options, lambda step: PROBLEMS, PROBLEMS).run(told.append)
    assert told == read_metrics(path)
    assert is_complete(path)
    return told


def test_every_update_is_served_before_the_next_rollout_and_hints_keep_the_trainer_near_it(
    engine: EngineProcess, fp4_policy: Policy, tmp_path: Path
) -> None:
    found = {arm: run_arm(engine, fp4_policy, tmp_path / arm, arm, OPTIONS) for arm in ("qat", "bf16", "trace")}
    assert engine.request("/trace/report")["weights"]["label"] == "step-3"
    for rows in found.values():
        assert [row["version_diff"] for row in rows] == [0, 0, 0]
        assert all(row["stale"] == 0 and row["trained_tokens"] > 0 for row in rows)
    for step in range(3):
        assert found["trace"][step]["abs_delta"] < 0.3 * found["qat"][step]["abs_delta"]
        assert found["trace"][step]["abs_delta"] < 0.3 * found["bf16"][step]["abs_delta"]


def test_answers_that_are_older_than_the_limit_are_not_learned_from(
    engine: EngineProcess, fp4_policy: Policy, tmp_path: Path
) -> None:
    strict = run_arm(engine, fp4_policy, tmp_path / "strict", "trace", replace(OPTIONS, lag=1, max_version_diff=0))
    assert [row["version_diff"] for row in strict] == [0, 1, 1]
    assert [row["stale"] for row in strict] == [0, 8, 8]
    assert ["k3" in row for row in strict] == [True, False, False]
    lenient = run_arm(engine, fp4_policy, tmp_path / "lenient", "trace", replace(OPTIONS, lag=1, max_version_diff=1))
    assert [row["stale"] for row in lenient] == [0, 0, 0]
    assert all("k3" in row for row in lenient)
