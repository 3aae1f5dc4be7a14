"""Every served family in training: what is rounded, whose routes are followed, and the same gradient when recomputed.

The oracle rounds through codes and scales (`quantize`, then `dequantize`) in attention and experts of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import engine_models_hf as models
import pytest
import torch
import transformers
from plug_rollouts import LAYERS, RECIPE, rollout, tokens_of
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.plugs.hf import HintedModel, checkpoint_tensors
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.hints.rows import HintFile
from trace_serve.recipe import Recipe

ROTATED = Recipe(expert_rotation=16, k_rotation=16)
HYBRID = "qwen3_5_moe"
# Narrow enough that many values of K and V are clipped.
OVERRIDES: dict[str, dict[str, Any]] = {"olmoe": {"clip_qkv": 0.3}}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products this small only lose time to threads that wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(models.FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(family: str) -> Any:
    return models.build(family, **OVERRIDES.get(family, {}))


@pytest.fixture
def model(plain: Any) -> Any:
    return copy.deepcopy(plain).train()


def hints_of(model: Any, seed: int, tokens: int, recipe: Recipe = RECIPE) -> HintFile:
    hybrid = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    return rollout(
        seed,
        tokens,
        recipe=recipe,
        kv_layers=(1, 3) if hybrid else LAYERS,
        head_dim=32 if hybrid else models.HEAD_DIM,
    )


def image(weight: Tensor, recipe: Recipe, parts: int) -> Tensor:
    kept = nvfp4.quantize_weight(nvfp4.rotate(weight, recipe.expert_rotation), recipe, parts=parts)
    return nvfp4.dequantize(kept, torch.bfloat16)


def oracle(plain: Any, recipe: Recipe) -> Any:
    """A copy that computes under the recipe by other code than the plug's."""

    def operand(x: Tensor) -> Tensor:
        codes = nvfp4.quantize_tokens(nvfp4.rotate(x, recipe.expert_rotation), recipe)
        return nvfp4.dequantize(codes, torch.bfloat16)

    def experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in range(models.EXPERTS):
            mine = chosen == expert
            rows = mine.any(dim=-1)
            if not rows.any():
                continue
            x = operand(hidden[rows])
            gate, up = linear(x, image(module.gate_up_proj[expert], recipe, 2)).float().chunk(2, dim=-1)
            middle = operand((silu(gate) * up).bfloat16())
            share = (weights.float() * mine).sum(dim=-1)[rows]
            out[rows] += linear(middle, image(module.down_proj[expert], recipe, 1)).float() * share.unsqueeze(-1)
        return out.bfloat16()

    def kept(x: Tensor, scale: float, rotation: int) -> Tensor:
        codes = nvfp4.quantize(nvfp4.rotate(x, rotation), scale, recipe, operand="kv")
        return nvfp4.dequantize(codes, torch.bfloat16)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        k_scale, v_scale = recipe.kv_scales(module.layer_idx)
        query = nvfp4.rotate(query, recipe.k_rotation).bfloat16()
        key, value = kept(key, k_scale, recipe.k_rotation), kept(value, v_scale, 0)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    # A name for each recipe: transformers looks the function up when the model computes.
    name = f"oracle_{recipe.recipe_id}"
    ALL_EXPERTS_FUNCTIONS.register(name, experts)
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    own = copy.deepcopy(plain)
    own.set_experts_implementation(name)
    own.set_attn_implementation(name)
    return own


@pytest.mark.parametrize("recipe", [RECIPE, ROTATED], ids=["default", "rotated"])
def test_experts_and_kv_are_those_of_the_oracle(plain: Any, model: Any, recipe: Recipe) -> None:
    HintedModel(model, recipe)
    ids = torch.cat([tokens_of(seed, 20) for seed in (1, 2)])
    with torch.inference_mode():
        found = model(ids, rollout_hints=[None, None], use_cache=False).logits
        expected = oracle(plain, recipe)(ids, use_cache=False).logits
        assert torch.equal(found, expected)
        assert not torch.equal(found, plain(ids, use_cache=False).logits)


def test_hints_and_routes_reach_every_layer_that_has_them(plain: Any, model: Any) -> None:
    hints = [hints_of(plain, seed, 20) for seed in (1, 2)]
    ids = torch.cat([tokens_of(seed, 20) for seed in (1, 2)])
    reference = copy.deepcopy(plain)
    fake_quantize(reference, RECIPE, HintedRounding(RECIPE, hints))
    HintedModel(model, RECIPE)
    with torch.inference_mode():
        found = model(ids, rollout_hints=hints, use_cache=False).logits
        with RoutingReplay(reference, hints):
            assert torch.equal(found, reference(ids, use_cache=False).logits)


def test_experts_are_the_recorded_ones_weighed_by_the_trainers_router(family: str, model: Any) -> None:
    HintedModel(model, RECIPE)
    seen: list[tuple[Tensor, Tensor]] = []
    logits: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[1], inputs[2])))
        elif name.endswith(".gate"):
            module.register_forward_hook(lambda _, inputs, output: logits.append(output[0]))
    hints = hints_of(model, 1, 20)
    with torch.inference_mode():
        model(tokens_of(1, 20), rollout_hints=[hints], use_cache=False)
    assert hints.routed_experts is not None
    assert len(seen) == len(logits) == models.LAYERS
    for layer, ((chosen, weights), scores) in enumerate(zip(seen, logits, strict=True)):
        assert chosen[:-1].tolist() == hints.routed_experts[:, layer].tolist()
        assert chosen[-1].sort().values.tolist() == scores[-1].topk(2).indices.sort().values.tolist()
        expected = scores.float().softmax(dim=-1).gather(-1, chosen)
        if family != "olmoe":
            expected = expected / expected.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(weights.float(), expected, rtol=0.01, atol=1e-3)


def test_a_recomputed_layer_has_the_gradient_of_one_that_was_kept(model: Any) -> None:
    found = []
    for checkpointed in (False, True):
        own = copy.deepcopy(model)
        hinted = HintedModel(own, RECIPE)
        if checkpointed:
            own.gradient_checkpointing_enable(hinted.checkpointing())
        losses = []
        for seed, tokens in ((1, 20), (2, 13)):
            ids = tokens_of(seed, tokens)
            hints = [hints_of(own, seed, tokens)]
            losses.append(own(ids, labels=ids, use_cache=False, rollout_hints=hints).loss)
            if not checkpointed:
                losses[-1].backward()
        if checkpointed:
            # Both micro-batches are in flight before the first layer is computed again.
            for each in losses:
                each.backward()
        found.append({name: weight.grad for name, weight in own.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_its_checkpoint_is_the_models_own(family: str, plain: Any, model: Any, tmp_path: Any) -> None:
    HintedModel(model, RECIPE)
    models.write_model(family, tmp_path / family, **OVERRIDES.get(family, {}))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.bfloat16)
    own, expected = checkpoint_tensors(model), checkpoint_tensors(saved)
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)


def test_packed_rows_are_refused_where_a_state_would_pass_from_one_sequence_to_the_next() -> None:
    model = models.build(HYBRID).train()
    HintedModel(model, RECIPE)
    ids = torch.cat([tokens_of(1, 12), tokens_of(2, 9)], dim=1)
    positions = torch.tensor([[*range(12), *range(9)]])
    hints = [hints_of(model, 1, 12), hints_of(model, 2, 9)]
    with pytest.raises(ConfigError, match="linear attention"):
        model(ids, position_ids=positions, rollout_hints=hints, use_cache=False)


def test_a_router_that_weighs_experts_otherwise_is_refused_by_name() -> None:
    config = transformers.MiniMaxM2Config(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=320, rotary_dim=8,
    )  # fmt: skip
    model = transformers.MiniMaxM2ForCausalLM(config)
    with pytest.raises(ConfigError, match="MiniMaxM2TopKRouter"):
        HintedModel(model, RECIPE)


@pytest.mark.parametrize(
    ("config_name", "model_name", "sizes", "named"),
    [
        ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4}, "experts"),
        ("Qwen3Config", "Qwen3ForCausalLM", {}, "Qwen3ForCausalLM"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_by_name(
    config_name: str, model_name: str, sizes: dict[str, Any], named: str
) -> None:
    common = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320}
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**common, **sizes))
    with pytest.raises(ConfigError, match=named):
        HintedModel(model, RECIPE)
