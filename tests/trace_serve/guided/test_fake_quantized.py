"""A recipe's training-time version against the reference: experts, KV cache and both rotations of a tiny Mixtral."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import engine_model
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import silu

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.hf.rounding import NearestRounding
from trace_serve.recipe import Recipe

PROMPT = torch.tensor([engine_model.token_ids(5, 24)])
ROTATED = Recipe(expert_rotation=16, k_rotation=16, kv_global_scale_log2=-2)


@pytest.fixture(scope="module")
def model(engine_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.bfloat16).eval()


def quantized(model: Any, recipe: Recipe, rounding: Any = None) -> Any:
    own = copy.deepcopy(model)
    fake_quantize(own, recipe, rounding)
    return own


def rounded(x: Tensor, recipe: Recipe) -> Tensor:
    return nvfp4.dequantize(nvfp4.quantize_tokens(nvfp4.rotate(x, recipe.expert_rotation), recipe), torch.bfloat16)


def image(weight: Tensor, recipe: Recipe, parts: int) -> Tensor:
    kept = nvfp4.quantize_weight(nvfp4.rotate(weight, recipe.expert_rotation), recipe, parts=parts)
    return nvfp4.dequantize(kept, torch.bfloat16)


def kept_kv(x: Tensor, scale: float, recipe: Recipe, rotation: int) -> Tensor:
    return nvfp4.dequantize(nvfp4.quantize(nvfp4.rotate(x, rotation), scale, recipe, operand="kv"), torch.bfloat16)


def experts_of(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        ROTATED,
        Recipe(gate_up_scale="split", weight_global_scale="per_expert", activation_global_scale="per_token"),
        Recipe(experts="w4a16", expert_rotation=32),
    ],
    ids=["default", "rotated", "split", "weights only"],
)
def test_experts_multiply_the_images_of_rotated_operands(model: Any, recipe: Recipe) -> None:
    own, plain = experts_of(quantized(model, recipe))[2], experts_of(model)[2]
    x = torch.randn(6, engine_model.HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen, share = torch.tensor([[3], [1], [3], [1], [1], [3]]), torch.full((6, 1), 0.5)
    acts = recipe.experts == "w4a4"

    def operand(values: Tensor) -> Tensor:
        return rounded(values, recipe) if acts else nvfp4.rotate(values, recipe.expert_rotation).bfloat16()

    expected = torch.empty_like(x)
    with torch.inference_mode():
        for expert in (1, 3):
            rows = chosen[:, 0] == expert
            gate, up = (operand(x[rows]) @ image(plain.gate_up_proj[expert], recipe, 2).T).float().chunk(2, dim=-1)
            middle = operand((silu(gate) * up).bfloat16())
            expected[rows] = ((middle @ image(plain.down_proj[expert], recipe, 1).T).float() * 0.5).bfloat16()
        assert torch.equal(own(x, chosen, share), expected)
        assert not torch.equal(own(x, chosen, share), plain(x, chosen, share))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in FP32: [1, heads, T, D], keys and values by group, to BF16 [1, T, heads * D]."""
    k, v = (x.repeat_interleave(engine_model.HEADS // engine_model.KV_HEADS, dim=1).float() for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) / math.sqrt(engine_model.HEAD_DIM)
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~causal, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2).bfloat16()


@pytest.mark.parametrize("rotation", [0, 16])
def test_attention_reads_keys_and_values_as_the_cache_keeps_them(model: Any, rotation: int) -> None:
    recipe = Recipe(experts="bf16", k_rotation=rotation)
    seen: dict[str, Any] = {}
    own = quantized(model, recipe)
    attention = own.model.layers[1].self_attn
    attention.register_forward_hook(lambda module, args, named, out: seen.update(named, out=out[0]), with_kwargs=True)
    with torch.inference_mode():
        own(PROMPT)
        heads = (1, PROMPT.shape[1], -1, engine_model.HEAD_DIM)
        states = seen["hidden_states"]
        q, k, v = (getattr(attention, f"{name}_proj")(states).view(heads).transpose(1, 2) for name in "qkv")
        q, k = transformers.models.mixtral.modeling_mixtral.apply_rotary_pos_emb(q, k, *seen["position_embeddings"])
        plain = attention.o_proj(attend(q, k, v))
        q = nvfp4.rotate(q, rotation).bfloat16()
        kept = attention.o_proj(attend(q, kept_kv(k, 1.0, recipe, rotation), kept_kv(v, 1.0, recipe, 0)))
    distance = (seen["out"] - kept).float().abs().mean()
    assert distance < 0.1 * (seen["out"] - plain).float().abs().mean()


def test_a_rotation_of_queries_and_keys_alone_changes_no_score(model: Any) -> None:
    class Exact(NearestRounding):
        def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
            return x

        def values(self, layer: int, x: Tensor, first: int) -> Tensor:
            return x

    recipe = Recipe(experts="bf16", k_rotation=16)
    with torch.inference_mode():
        plain = model(PROMPT).logits.float()
        turned = quantized(model, recipe, Exact(recipe))(PROMPT).logits.float()
        rounded_too = quantized(model, recipe)(PROMPT).logits.float()
    assert (turned - plain).abs().mean() < 0.3 * (rounded_too - plain).abs().mean()


def test_answering_with_a_cache_computes_what_one_pass_does(model: Any) -> None:
    own = quantized(model, ROTATED)
    with torch.inference_mode():
        options = {"max_new_tokens": 5, "do_sample": False}
        answer = own.generate(PROMPT, **options, output_logits=True, return_dict_in_generate=True)
        whole = own(answer.sequences, use_cache=False).logits[0].float()
        again = own.generate(PROMPT, **options)
    steps = torch.stack([step[0].float() for step in answer.logits])
    # Of logits up to 2.4; products of one row and of many may add up in another order.
    assert (steps - whole[PROMPT.shape[1] - 1 : -1]).abs().mean() < 0.05
    assert torch.equal(again, answer.sequences)


def test_layers_that_the_recipe_leaves_alone_stay_as_they_are(model: Any) -> None:
    recipe = Recipe(expert_layers=(2,), kv_layers=(0, 3))
    own = copy.deepcopy(model)
    layers = fake_quantize(own, recipe)
    assert (layers.experts, layers.kv) == (1, 2)
    for layer, (one, two) in enumerate(zip(experts_of(own), experts_of(model), strict=True)):
        assert torch.equal(one.gate_up_proj, two.gate_up_proj) == (layer != 2)


class Recorder(NearestRounding):
    """Follows the recipe and writes down what it was asked, as a rule with hints would look it up."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.passes: list[tuple[int, int]] = []
        self.keys_at: dict[int, list[tuple[int, int]]] = {}
        self.routed: dict[int, list[tuple[int, int]]] = {}
        self.rows: dict[int, list[int]] = {}

    def begin(self, first: int, count: int) -> None:
        self.passes.append((first, count))

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        self.rows.setdefault(layer, []).append(x.shape[0])
        return super().experts_in(layer, x)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        assert x.shape == (len(rows), engine_model.INTERMEDIATE)
        self.routed.setdefault(layer, []).extend(zip(rows.tolist(), places.tolist(), strict=True))
        return super().experts_mid(layer, x, rows, places)

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        assert x.dtype == torch.float32
        self.keys_at.setdefault(layer, []).append((first, x.shape[2]))
        return super().keys(layer, x, first)


def test_a_rounding_is_told_the_position_and_place_of_every_value(model: Any) -> None:
    recorder = Recorder(ROTATED)
    own = quantized(model, ROTATED, recorder)
    length = PROMPT.shape[1]
    with torch.inference_mode():
        own.generate(PROMPT, max_new_tokens=3, do_sample=False)
        own.generate(PROMPT, max_new_tokens=1, do_sample=False)
    passes = [(0, length), (length, 1), (length + 1, 1), (0, length)]
    assert recorder.passes == passes
    for layer in range(engine_model.LAYERS):
        assert recorder.keys_at[layer] == passes
        assert recorder.rows[layer] == [count for _, count in passes]
    assert sorted(recorder.routed[0][: 2 * length]) == [(row, place) for row in range(length) for place in range(2)]


def test_gradients_pass_through_the_rounding_to_what_was_rounded(model: Any) -> None:
    own = quantized(model, ROTATED)
    own(PROMPT, use_cache=False).logits.float().square().mean().backward()
    for projection in ("q_proj", "k_proj", "v_proj"):
        gradient = getattr(own.model.layers[0].self_attn, projection).weight.grad
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_a_model_without_the_parts_that_a_recipe_names_is_refused() -> None:
    class Model:
        def modules(self) -> list[object]:
            return []

        def named_modules(self) -> list[tuple[str, object]]:
            return []

    with pytest.raises(ConfigError, match="no experts that the recipe quantizes"):
        fake_quantize(Model(), Recipe())
    with pytest.raises(ConfigError, match="no KV cache that the recipe quantizes"):
        fake_quantize(Model(), Recipe(experts="bf16"))
