"""A transformers model that follows the hints of a rollout on the real engine comes closer to it than without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import engine_model
import numpy as np
import pytest
import torch
import transformers
from engine_client import decoded, generate

from trace_serve.engine.launch import EngineProcess
from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.plugs.hf import HintedModel
from trace_serve.guided.plugs.micro_batch import MicroBatches
from trace_serve.guided.plugs.modelopt import HintedQuantizers
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.hints.rows import HintFile
from trace_serve.policy import Policy
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.engine

SITES = ["experts_in", "k", "v"]


@pytest.fixture(scope="module")
def rollouts(fp4_engine: EngineProcess) -> list[HintFile]:
    """Hints of sampled continuations with log-probabilities and routed experts."""
    options = {"sink": "inline", "sites": SITES, "scale": "lsb"}
    prompts = [engine_model.token_ids(seed, 20) for seed in range(3)]
    answers = [
        generate(fp4_engine, prompt, new=40, hints=options, temperature=1.0, return_logprob=True) for prompt in prompts
    ]
    return [decoded(answer) for answer in answers]


@pytest.fixture(scope="module")
def model(engine_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.bfloat16).eval()


def distance(model: Any, rollout: HintFile, **named: Any) -> float:
    """Mean |trainer's - rollout's| log-probability of the sampled tokens."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).unsqueeze(0)
    following = np.append(rollout.token_ids[1:], rollout.next_token_id)
    with torch.inference_mode():
        scores = torch.log_softmax(model(ids, **named).logits[0].float(), dim=-1)
    own = scores[torch.arange(len(following)), torch.from_numpy(following.astype(np.int64))].numpy()
    assert rollout.logprobs is not None
    sampled = ~np.isnan(rollout.logprobs)
    assert sampled.sum() >= 39
    return float(np.abs(own - rollout.logprobs)[sampled].mean())


def test_hints_and_routes_bring_the_trainer_to_the_rollout(
    model: Any, rollouts: list[HintFile], fp4_policy: Policy
) -> None:
    recipe = fp4_policy.recipe
    nearest = copy.deepcopy(model)
    fake_quantize(nearest, recipe)
    found = []
    for rollout in rollouts:
        hinted = copy.deepcopy(model)
        fake_quantize(hinted, recipe, HintedRounding(recipe, [rollout]))
        with RoutingReplay(hinted, [rollout]) as replay:
            guided = distance(hinted, rollout)
        assert replay.agreement > 0.95
        found.append((distance(model, rollout), distance(nearest, rollout), guided))
    bf16, quantized, guided = np.array(found).mean(axis=0)
    assert guided < 0.5 * quantized
    assert guided < 0.5 * bf16


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("plug", [HintedModel, HintedQuantizers])
def test_plugs_bring_a_trainer_to_the_rollout(
    model: Any, rollouts: list[HintFile], fp4_policy: Policy, plug: type[MicroBatches]
) -> None:
    own = copy.deepcopy(model)
    plug(own, fp4_policy.recipe)
    options = {"use_cache": False}
    nearest = [distance(own, each, rollout_hints=[None], **options) for each in rollouts]
    guided = [distance(own, each, rollout_hints=[each], **options) for each in rollouts]
    assert np.mean(guided) < 0.5 * np.mean(nearest)


def test_a_batch_is_guided_sequence_by_sequence(model: Any, rollouts: list[HintFile], fp4_policy: Policy) -> None:
    recipe = fp4_policy.recipe
    length = min(rollout.rows for rollout in rollouts[:2])
    ids = torch.stack([torch.from_numpy(each.token_ids[:length].astype(np.int64)) for each in rollouts[:2]])

    def logits(hints: list[HintFile | None], tokens: torch.Tensor) -> torch.Tensor:
        own = copy.deepcopy(model)
        fake_quantize(own, recipe, HintedRounding(recipe, hints))
        with RoutingReplay(own, hints), torch.inference_mode():
            return own(tokens).logits.float()

    together = logits([rollouts[0], rollouts[1]], ids)
    for index in range(2):
        alone = logits([rollouts[index]], ids[index : index + 1])[0]
        swapped = logits([rollouts[1 - index]], ids[index : index + 1])[0]
        assert (together[index] - alone).abs().mean() < 0.2 * (together[index] - swapped).abs().mean()


def test_hints_without_rows_for_a_position_leave_it_to_nearest(model: Any, fp4_policy: Policy) -> None:
    recipe = fp4_policy.recipe
    ids = torch.tensor([engine_model.token_ids(5, 16)])
    nearest, unguided = copy.deepcopy(model), copy.deepcopy(model)
    fake_quantize(nearest, recipe)
    fake_quantize(unguided, recipe, HintedRounding(recipe, [None]))
    with torch.inference_mode():
        assert torch.equal(nearest(ids).logits, unguided(ids).logits)


def test_the_gradient_reaches_the_weights_under_checkpointing_and_is_the_same(
    model: Any, rollouts: list[HintFile], fp4_policy: Policy
) -> None:
    recipe = fp4_policy.recipe
    ids = torch.from_numpy(rollouts[0].token_ids.astype(np.int64)).unsqueeze(0)
    gradients = []
    for checkpointing in (False, True):
        own = copy.deepcopy(model).train()
        fake_quantize(own, recipe, HintedRounding(recipe, [rollouts[0]]))
        if checkpointing:
            own.gradient_checkpointing_enable({"use_reentrant": False})
        with RoutingReplay(own, [rollouts[0]]):
            own(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: weight.grad for name, weight in own.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("experts" in name for name in gradients[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_hints_of_another_recipe_or_model_are_refused(model: Any, rollouts: list[HintFile], fp4_policy: Policy) -> None:
    with pytest.raises(HintFormatError, match="recipe_id"):
        HintedRounding(Recipe(k_rotation=16), rollouts)
    with pytest.raises(ConfigError, match="sites"):
        HintedRounding(fp4_policy.recipe, rollouts, sites=["q"])
    with pytest.raises(ConfigError, match="router"):
        RoutingReplay(torch.nn.Linear(2, 2), rollouts)
