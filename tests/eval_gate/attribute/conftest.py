"""A model whose losses are known: which queries a recipe loses follows from stated effects."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import Role, SampleRecord
from eval_gate.attribute.cost import CostModel
from eval_gate.attribute.readings import Reading, read
from eval_gate.attribute.search import Findings, Search, drive
from eval_gate.attribute.trials import Trial
from eval_gate.attribute.variants import Layout
from eval_gate.cli import main
from eval_gate.pairing import ArmResults
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet
from trace_serve.policy.dims import ModelDims
from trace_serve.recipe import Recipe

LAYERS = tuple(range(16))
LAYOUT = Layout(LAYERS, LAYERS, 64)
DIMS = ModelDims("known", 16, 64, 128, 4, LAYERS, 2, 64, 10_000, 0)
COST = CostModel(DIMS, LAYOUT, kv_tokens=1000)
POLICY = GatePolicy(margin=0.05, allow_unproven=True)


def query_set(count: int) -> QuerySet:
    queries = tuple(
        Query.model_validate({"id": f"q{i}", "prompt": "2 + 2?", "checker": {"type": "exact", "expected": "4"}})
        for i in range(count)
    )
    return QuerySet(queries, "sha256:" + "c" * 64, "known.jsonl")


def sample(role: Role, number: int, passed: bool, **changes: Any) -> SampleRecord:
    values: dict[str, Any] = {
        "key": f"{role}{number}",
        "query_id": f"q{number}",
        "role": role,
        "sample": 0,
        "request": {},
        "text": "4" if passed else "5",
        "finish_reason": "stop",
        "passed": passed,
        "attempts": 1,
    }
    return SampleRecord(**values | changes)


Effect = tuple[Callable[[Recipe], bool], int]
"""When it holds, and how many queries it loses; every effect has queries of its own."""


@dataclass
class KnownModel:
    """Answers trials from stated effects.

    Attributes:
        noise: queries that any FP4 loses, and as many others that it gains.
        trials: what was asked, in order.
        readings: what was answered, by recipe.
    """

    effects: list[Effect]
    count: int = 400
    noise: int = 3
    stop_after: int | None = None
    trials: list[Trial] = field(default_factory=list)
    readings: dict[str, Reading] = field(default_factory=dict)

    async def evaluate(self, trial: Trial) -> Reading | None:
        self.trials.append(trial)
        if self.stop_after is not None and len(self.trials) > self.stop_after:
            return None
        lost, start = set(range(self.noise)), 2 * self.noise
        for holds, many in self.effects:
            if holds(trial.recipe):
                lost |= set(range(start, start + many))
            start += many
        gained = range(self.noise, 2 * self.noise)
        one = [sample(Role.TRAINING, i, i not in gained) for i in range(self.count)]
        two = [sample(Role.SERVING, i, i not in lost) for i in range(self.count)]
        evidence = ArmEvidence(source="known")
        reading = read(POLICY, query_set(self.count), ArmResults(evidence, one), ArmResults(evidence, two))
        self.readings[trial.recipe.recipe_id] = reading
        return reading

    def search(self, recipe: Recipe, engines: int, **options: Any) -> Findings:
        """What the search finds with so many engines; fails if it starts more."""
        search = Search(recipe, LAYOUT, engines=engines, cost=COST, **options)
        found = asyncio.run(drive(search.run(), self.evaluate))
        assert len(self.trials) <= engines
        assert len({trial.recipe.recipe_id for trial in self.trials}) == len(self.trials)
        return found


@pytest.fixture
def known() -> Callable[..., KnownModel]:
    """Builds a model from (condition, queries lost) pairs."""

    def build(*effects: Effect, **options: Any) -> KnownModel:
        return KnownModel(list(effects), **options)

    return build


def expert_layer(layer: int, recipe: Recipe) -> bool:
    return recipe.quantizes_experts(layer)


def kv_layer(layer: int, recipe: Recipe) -> bool:
    return recipe.quantizes_kv(layer)


@pytest.fixture
def in_expert_layer() -> Callable[[int], Callable[[Recipe], bool]]:
    return lambda layer: partial(expert_layer, layer)


@pytest.fixture
def in_kv_layer() -> Callable[[int], Callable[[Recipe], bool]]:
    return lambda layer: partial(kv_layer, layer)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eval-gate", "attribute", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run
