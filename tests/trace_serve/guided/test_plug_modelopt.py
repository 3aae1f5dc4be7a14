"""ModelOpt's quantizers round by hints: where, to what, and beside the plug for plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_model
import pytest
import torch
import transformers
from plug_rollouts import RECIPE, rollout, tokens_of

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.guided.plugs.hf import HintedModel
from trace_serve.guided.plugs.modelopt import BACKEND, HintedQuantizers
from trace_serve.guided.replay import HintedRounding
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products this small only lose time to threads that wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(engine_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.bfloat16).eval()


def logits(model: Any, hints: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids, rollout_hints=hints, use_cache=False).logits.float()
    return found


@pytest.mark.parametrize("recipe", [RECIPE, Recipe(expert_rotation=16, k_rotation=16)], ids=["default", "rotated"])
def test_it_rounds_where_and_as_the_plug_for_transformers_does(plain: Any, recipe: Recipe) -> None:
    own, reference = copy.deepcopy(plain), copy.deepcopy(plain)
    HintedQuantizers(own, recipe)
    HintedModel(reference, recipe)
    ids = tokens_of(1, 20)
    hints = [rollout(1, 20, recipe=recipe)]
    followed, nearest = logits(reference, hints, ids), logits(reference, [None], ids)
    distance = (nearest - followed).abs().mean()
    # Experts are summed in another order and precision, so single values may round otherwise.
    assert (logits(own, hints, ids) - followed).abs().mean() < 0.35 * distance
    assert (logits(own, [None], ids) - nearest).abs().mean() < 0.35 * distance


def test_an_experts_operands_are_exactly_the_rounded_ones(plain: Any) -> None:
    own, hints = copy.deepcopy(plain), rollout(1, 20)
    HintedQuantizers(own, RECIPE)
    experts = own.model.layers[0].mlp.experts
    layer: list[Any] = []
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts.register_forward_pre_hook(lambda module, inputs: layer.extend(inputs))
    experts.gate_up_proj_input_quantizer.register_forward_hook(
        lambda module, inputs, output: calls.append((inputs[0], output))
    )
    logits(own, [hints], tokens_of(1, 20))
    rounding = HintedRounding(RECIPE, [hints])
    rounding.begin(0, 20)
    hidden, chosen, _ = layer
    expected = rounding.experts_in(0, hidden)
    assert not torch.equal(expected, nvfp4.fake_quantize_tokens(hidden, RECIPE))
    assert len(calls) == engine_model.EXPERTS
    for expert, (given, kept) in enumerate(calls):
        rows = torch.where((chosen == expert).T)[1]
        assert torch.equal(given, hidden[rows])
        assert torch.equal(kept, expected[rows])
    weight = plain.model.layers[0].mlp.experts.gate_up_proj[1]
    image = experts.gate_up_proj_weight_quantizers[1](weight)
    assert torch.equal(image, nvfp4.fake_quantize_weight(weight, RECIPE, parts=2))


def test_gradients_reach_the_experts_and_recomputation_keeps_its_hints(plain: Any) -> None:
    found = []
    for checkpointed in (False, True):
        model = copy.deepcopy(plain).train()
        hinted = HintedQuantizers(model, RECIPE)
        if checkpointed:
            model.gradient_checkpointing_enable(hinted.checkpointing())
        losses = []
        for seed, tokens in ((1, 12), (2, 9)):
            ids = tokens_of(seed, tokens)
            losses.append(model(ids, labels=ids, use_cache=False, rollout_hints=[rollout(seed, tokens)]).loss)
            if not checkpointed:
                losses[-1].backward()
        if checkpointed:
            for each in losses:
                each.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert any("down_proj" in name and "experts" in name for name in found[0])
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_layers_that_the_recipe_leaves_alone_are_disabled(plain: Any) -> None:
    model = copy.deepcopy(plain)
    HintedQuantizers(model, Recipe(expert_layers=(2,), kv_layers=(0, 3), experts="w4a16"), replay_routes=False)
    layers = model.model.layers
    assert [bool(each.mlp.experts.down_proj_weight_quantizers[0].is_enabled) for each in layers] == [0, 0, 1, 0]
    assert [bool(each.self_attn.k_bmm_quantizer.is_enabled) for each in layers] == [1, 0, 0, 1]
    assert not any(each.mlp.experts.down_proj_input_quantizer.is_enabled for each in layers)
    assert not any(each.self_attn.q_bmm_quantizer.is_enabled for each in layers)


def test_a_quantizer_that_is_not_the_plugs_is_refused(plain: Any) -> None:
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    HintedQuantizers(copy.deepcopy(plain), RECIPE)
    stray = TensorQuantizer(QuantizerAttributeConfig(backend=BACKEND))
    with pytest.raises(ConfigError, match="none of the recipe's"):
        stray(torch.ones(2, 16))
