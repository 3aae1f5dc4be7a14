"""Answers are kept by model, recipe, queries and sampling; only what is missing is asked (of a real HTTP server)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role
from eval_gate.arms.source import ArmSource
from eval_gate.attribute.answers import Answered, Answers, Recording
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet
from trace_serve.recipe import Recipe

COUNT = 6


def query_set(digest: str = "c") -> QuerySet:
    queries = tuple(
        Query.model_validate({"id": f"q{i}", "prompt": f"p{i}", "checker": {"type": "exact", "expected": f"p{i}"}})
        for i in range(COUNT)
    )
    return QuerySet(queries, "sha256:" + digest * 64, "known.jsonl")


@pytest.fixture
def server(start_server: Callable[[], Any]) -> Any:
    return start_server()


@pytest.fixture
def source(server: Any) -> ArmSource:
    evidence = ArmEvidence(source="model", artifact_digest="sha256:" + "a" * 64)
    return ArmSource(Role.TRAINING, None, Endpoint(server.url), None, evidence)


async def answers(
    source: ArmSource, directory: Path, recipe: Recipe | None = None, queries: QuerySet | None = None, **options: Any
) -> Answered:
    values: dict[str, Any] = {"recording": Recording(), "budget": Budget(), "policy": GatePolicy()} | options
    directory.mkdir(exist_ok=True)
    async with GraderPool() as graders:
        one = Answers(
            source,
            queries or query_set(),
            values.pop("policy"),
            directory,
            graders=graders,
            startup_timeout_s=10,
            on_sample=lambda record: None,
            **values,
        )
        return await one.of(recipe)


async def test_complete_answers_are_not_asked_again(server: Any, source: ArmSource, tmp_path: Path) -> None:
    first = await answers(source, tmp_path)
    assert (first.recorded, first.complete, len(server.prompts)) == (False, True, COUNT)
    again = await answers(source, tmp_path)
    assert (again.recorded, again.complete, len(server.prompts)) == (True, True, COUNT)
    assert [one.key for one in again.results.samples] == [one.key for one in first.results.samples]
    assert all(one.passed for one in again.results.samples)


async def test_after_a_kill_only_what_is_missing_is_asked(server: Any, source: ArmSource, tmp_path: Path) -> None:
    await answers(source, tmp_path)
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    server.prompts.clear()
    found = await answers(source, tmp_path)
    # The first line says what the arm is; three answers were whole.
    assert len(server.prompts) == COUNT - 3
    assert len(found.results.samples) == COUNT
    assert (await answers(source, tmp_path)).recorded


async def test_another_recipe_model_query_file_or_sampling_is_asked_anew(
    server: Any, source: ArmSource, tmp_path: Path
) -> None:
    other = replace(source, evidence=source.evidence.model_copy(update={"artifact_digest": "sha256:" + "b" * 64}))
    await answers(source, tmp_path)
    await answers(source, tmp_path, Recipe())
    await answers(source, tmp_path, Recipe(kv="bf16"))
    await answers(other, tmp_path)
    await answers(source, tmp_path, queries=query_set("d"))
    await answers(source, tmp_path, policy=GatePolicy(temperature=0.5))
    await answers(source, tmp_path, recording=Recording(tokens=False))
    assert len(list(tmp_path.glob("*.jsonl"))) == 7
    assert len(server.prompts) == 7 * COUNT


async def test_log_probabilities_and_routes_are_asked_for_as_configured(
    server: Any, source: ArmSource, tmp_path: Path
) -> None:
    await answers(source, tmp_path, recording=Recording(tokens=True, routes=True))
    body = server.bodies[-1]
    assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
    assert body["return_token_ids"] is body["return_routed_experts"] is True
    await answers(source, tmp_path, policy=GatePolicy(api="completions"))
    assert server.bodies[-1]["logprobs"] == 1
    await answers(source, tmp_path, recording=Recording(tokens=False))
    assert "logprobs" not in server.bodies[-1]


async def test_a_spent_budget_starts_nothing_and_is_not_complete(
    server: Any, source: ArmSource, tmp_path: Path
) -> None:
    found = await answers(source, tmp_path, budget=Budget(max_wall_s=0))
    assert (found.complete, server.prompts) == (False, [])
    await answers(source, tmp_path)
    known = await answers(source, tmp_path, budget=Budget(max_wall_s=0))
    assert (known.recorded, known.complete) == (True, True)
