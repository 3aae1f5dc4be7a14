"""The trainer's forward as an arm: a tiny Mixtral in transformers, in BF16 and with fake-quantized experts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval_gate.arms.fake_experts import NearestRounding, quantize_experts
from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.execute import jobs
from eval_gate.policy import GatePolicy
from eval_gate.preflight import check_arm, compare_arms
from eval_gate.queries import Query, QuerySet
from trace_serve import nvfp4
from trace_serve.errors import ConfigError, PolicyError
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
    assert (evidence.report.mode, evidence.report.experts.layers_quantized) == (
        "fake_quantized",
        evidence.report.experts.layers_total,
    )
    assert check_arm(Role.TRAINING, evidence) == []
    other = evidence.model_copy(update={"recipe_id": "sha256:" + "0" * 64})
    assert "expected 'fake_quantized' under" in check_arm(Role.TRAINING, other)[0].message
    assert compare_arms(evidence, evidence) == []


def test_what_the_experts_compute_is_the_product_of_quantized_operands(engine_model: Path) -> None:
    import transformers

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.bfloat16).eval()

    recipe = Recipe(expert_layers=(0,))
    model, reference = load(), load()
    assert quantize_experts(model, recipe) == 1
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    weights = next(module for name, module in reference.named_modules() if name.endswith(".experts"))
    image = nvfp4.fake_quantize_weight(weights.gate_up_proj[1], recipe, parts=2)
    assert torch.equal(experts[0].gate_up_proj[1], image)
    assert not torch.equal(experts[0].gate_up_proj[1], weights.gate_up_proj[1])
    x = torch.randn(3, image.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen, share = torch.tensor([[1], [1], [1]]), torch.ones(3, 1)
    rounding = NearestRounding(recipe)
    with torch.inference_mode():
        gate, up = (rounding.experts_in(0, x) @ image.T).float().chunk(2, dim=-1)
        middle = rounding.experts_mid(0, 1, (torch.nn.functional.silu(gate) * up).bfloat16())
        expected = middle @ experts[0].down_proj[1].T
        got = experts[0](x, chosen, share)
        plain = weights(x, chosen, share)
    assert torch.equal(got, expected)
    assert not torch.equal(got, plain)
    last = len(experts) - 1
    untouched = [m for n, m in reference.named_modules() if n.endswith(".experts")][last]
    assert last == 0 or torch.equal(experts[last].gate_up_proj, untouched.gate_up_proj)


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
        quantize_experts(Model(), Recipe())
    with pytest.raises(ConfigError, match="expert_rotation 16"):
        quantize_experts(Model(), Recipe(expert_rotation=16))


def test_the_same_files_in_transformers_and_in_an_engine_are_different_arms(engine_model: Path) -> None:
    query = Query.model_validate({"id": "q", "prompt": "p", "checker": {"type": "exact", "expected": "x"}})
    queries = QuerySet((query,), "sha256:" + "0" * 64, "q")
    specs = (str(engine_model), f"hf:{engine_model}", f"hf:{engine_model}@portable")
    keys = {next(jobs(queries, GatePolicy(), Role.TRAINING, source(spec).evidence)).key for spec in specs}
    assert len(keys) == 3
