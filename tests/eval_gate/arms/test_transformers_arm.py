"""The trainer's forward as an arm: a tiny Mixtral in transformers, in BF16 and with fake-quantized experts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.execute import jobs
from eval_gate.policy import GatePolicy
from eval_gate.preflight import check_arm, compare_arms
from eval_gate.queries import Query, QuerySet
from trace_serve.errors import ConfigError, PolicyError
from trace_serve.guided.hf.experts import quantize_experts
from trace_serve.guided.hf.rounding import NearestRounding
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import Recipe

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 6,
    "temperature": 0.0,
    "top_p": 1.0,
}


def source(spec: str) -> ArmSource:
    return resolve(Role.TRAINING, spec, Endpoint(url=""))


async def answer(one: ArmSource, body: dict[str, Any]) -> Any:
    async with one.open(10.0, Path("unused")) as arm:
        report = await arm.report()
        assert report is not None
        evidence = one.evidence.model_copy(update={"report": report})
        return await arm.complete(body), await arm.tokenize(body), evidence


async def test_bf16_answers_greedily_and_proves_what_it_is(engine_model: Path) -> None:
    one = source(f"hf:{engine_model}")
    exchange, tokens, evidence = await answer(one, BODY)
    assert exchange.failure is None
    assert (exchange.prompt_tokens, exchange.finish_reason) == (len(tokens), "length")
    assert exchange.completion_tokens == len(exchange.response["token_ids"]) == 6
    again, _, _ = await answer(one, BODY)
    assert again.response == exchange.response
    assert check_arm(Role.TRAINING, evidence) == []
    assert (evidence.runtime, evidence.recipe_id) == ("transformers", None)


async def test_sampling_follows_the_temperature_and_completions_have_no_template(engine_model: Path) -> None:
    async with source(f"hf:{engine_model}").open(10.0, Path("unused")) as arm:
        bodies = [BODY | {"temperature": 2.0, "max_tokens": 12}] * 4
        texts = {json.dumps(one.response) for one in await asyncio.gather(*(arm.complete(body) for body in bodies))}
        assert len(texts) > 1
        prompt = {"prompt": "Hello there", **{k: v for k, v in BODY.items() if k != "messages"}}
        assert await arm.tokenize(prompt) != await arm.tokenize(BODY)
        broken = await arm.complete(BODY | {"messages": [{"role": "nobody"}]})
        assert broken.text is None
        assert broken.failure is not None


async def test_experts_are_fake_quantized_under_the_recipe(fp4_policy: Policy) -> None:
    plain, _, _ = await answer(source(f"hf:{fp4_policy.path}"), BODY)
    one = source(f"hf:{fp4_policy.path}@policy")
    _, _, evidence = await answer(one, BODY)
    assert plain.failure is None
    assert evidence.recipe_id == fp4_policy.recipe_id
    assert evidence.report is not None
    assert evidence.report.mode == "fake_quantized"
    for part in (evidence.report.experts, evidence.report.kv):
        assert (part.format, part.layers_quantized) == ("nvfp4 (fake-quantized)", part.layers_total)
    assert check_arm(Role.TRAINING, evidence) == []
    other = evidence.model_copy(update={"recipe_id": "sha256:" + "0" * 64})
    assert "expected 'fake_quantized' under" in check_arm(Role.TRAINING, other)[0].message
    assert compare_arms(evidence, evidence) == []


def test_what_transformers_cannot_compute_is_refused(engine_model: Path) -> None:
    with pytest.raises(ConfigError, match="--serving hf:"):
        resolve(Role.SERVING, f"hf:{engine_model}", Endpoint(url=""))
    with pytest.raises(PolicyError, match=r"no policy\.json there"):
        source(f"hf:{engine_model}@policy")
    with pytest.raises(ConfigError, match="neither a URL"):
        source("hf:no/such/place")

    class Model:
        def named_modules(self) -> list[tuple[str, object]]:
            return [("layers.0.experts", object())]

    with pytest.raises(ConfigError, match="experts of this layout"):
        quantize_experts(Model(), Recipe(), NearestRounding(Recipe()))


def test_a_recipe_that_the_model_cannot_carry_is_refused_before_anything_is_loaded(
    engine_model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"k_rotation": 64}))
    with pytest.raises(PolicyError, match="head_dim 16 is not a multiple of 64"):
        source(f"hf:{engine_model}@{recipe}")


def test_the_same_files_in_transformers_and_in_an_engine_are_different_arms(engine_model: Path) -> None:
    query = Query.model_validate({"id": "q", "prompt": "p", "checker": {"type": "exact", "expected": "x"}})
    queries = QuerySet((query,), "sha256:" + "0" * 64, "q")
    specs = (str(engine_model), f"hf:{engine_model}", f"hf:{engine_model}@portable")
    keys = {next(jobs(queries, GatePolicy(), Role.TRAINING, source(spec).evidence)).key for spec in specs}
    assert len(keys) == 3
