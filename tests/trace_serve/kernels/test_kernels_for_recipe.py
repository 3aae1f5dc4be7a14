import pytest
import torch

from trace_serve.errors import ConfigError, RecipeError, ShapeError
from trace_serve.kernels import kernels_for
from trace_serve.nvfp4 import (
    dequantize,
    fake_quantize_weight,
    hint_bits,
    new_counters,
    quantize,
    quantize_tokens,
    rotate,
)
from trace_serve.recipe import PRESETS, Recipe

STATIC = Recipe(
    activation_global_scale="per_tensor_static",
    experts_in_global_scale=(2.0**-6,),
    experts_mid_global_scale=(0.01,),
    kv_global_scale="static",
    k_global_scale=(0.03,),
    v_global_scale=(0.25,),
)
RECIPES = {
    "portable": Recipe(expert_rotation=64, k_rotation=16),
    "gb200": PRESETS["gb200"],
    "paper": PRESETS["paper"],
    "static": STATIC,
    "split": Recipe(gate_up_scale="split", ties="up"),
    "lower maximum": Recipe(four_over_six="experts", global_scale_max=256),
}


@pytest.fixture(params=RECIPES)
def recipe(request) -> Recipe:
    return RECIPES[request.param]


def sample_rows() -> torch.Tensor:
    x = torch.randn(24, 128, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, 24).unsqueeze(1)
    x[3] = 0
    x[4, 7] = float("nan")
    return x.to(torch.bfloat16)


def assert_same(got, expected):
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.global_scale, expected.global_scale)


def test_activations_are_those_of_the_reference_under_every_recipe(recipe):
    x, scale = sample_rows(), recipe.experts_in_scale(0)
    counted, expected_counts = new_counters(), new_counters()
    got = kernels_for(recipe).quantize_activations(x, static_scale=scale, hints=True, counters=counted)
    expected = quantize_tokens(rotate(x, recipe.expert_rotation), recipe, static_scale=scale, counters=expected_counts)
    assert_same(got, expected)
    assert torch.equal(got.hints.view(torch.int16), hint_bits(expected.codes).view(torch.int16))
    assert torch.equal(counted, expected_counts)
    values, kept = kernels_for(recipe).fake_quantize_activations(x, static_scale=scale)
    assert_same(kept, expected)
    assert torch.equal(values.nan_to_num(), dequantize(expected).nan_to_num())


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_those_of_the_reference_under_every_recipe(recipe, parts):
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(6)) * 0.05
    w[16:] *= 7
    expected = fake_quantize_weight(rotate(w, recipe.expert_rotation), recipe, parts=parts).to(torch.bfloat16)
    assert torch.equal(kernels_for(recipe).fake_quantize_weight(w, parts=parts), expected)


def test_keys_and_values_are_those_of_the_reference_under_every_recipe(recipe):
    x = sample_rows()
    kernels = kernels_for(recipe)
    for scale, width in zip(recipe.kv_scales(0), (recipe.k_rotation, 0), strict=True):
        got = kernels.quantize_kv(x, global_scale=scale, rotation=width, hints=True)
        expected = quantize(rotate(x, width), torch.full((24,), scale), recipe, operand="kv")
        assert_same(got, expected)
        assert torch.equal(got.hints.view(torch.int16), hint_bits(got.codes).view(torch.int16))
        pool = got.codes.view(12, 2, 64), got.scales.view(12, 2, 8)
        back = kernels.gather_dequantize(*pool, torch.arange(12), scale)
        assert torch.equal(back.nan_to_num(), dequantize(expected).view(12, 2, 128).nan_to_num())


def test_the_fast_backend_serves_what_it_implements():
    assert kernels_for(Recipe()).name == "cpu"
    assert kernels_for(STATIC).name == "cpu"
    assert kernels_for(PRESETS["paper"]).name == "cpu"
    assert kernels_for(PRESETS["gb200"]).name == "cpu+reference"
    assert kernels_for(PRESETS["gb200"]).backend_of("activations") == kernels_for(PRESETS["gb200"]).backend_of("kv")
    assert kernels_for(PRESETS["gb200"]).backend_of("weights") == "reference"
    assert kernels_for(Recipe(weight_tiles="16x16")).backend_of("weights") == "reference"
    assert kernels_for(PRESETS["bf16"]).name == "cpu"
    assert kernels_for(Recipe(), name="reference").name == "reference"
    with pytest.raises(ConfigError):
        kernels_for(Recipe(), device="cuda", name="cpu")


def test_triton_serves_every_preset_on_a_card_but_for_weights_under_4over6():
    operands = ("activations", "weights", "kv")
    backends = {
        name: [kernels_for(PRESETS[name], "cuda").backend_of(operand) for operand in operands]
        for name in ("portable", "paper", "gb200")
    }
    assert backends == {
        "portable": ["triton"] * 3,
        "paper": ["triton"] * 3,
        "gb200": ["triton", "reference", "triton"],
    }


def test_a_static_scale_is_neither_guessed_nor_ignored():
    for recipe, scale in [(STATIC, None), (Recipe(), 1.0), (PRESETS["gb200"], 1.0)]:
        for method in ("quantize_activations", "fake_quantize_activations"):
            with pytest.raises(RecipeError) as caught:
                getattr(kernels_for(recipe), method)(sample_rows(), static_scale=scale)
            assert caught.value.field == "activation_global_scale"


def test_an_expert_without_tokens_gets_no_rows(recipe):
    empty = torch.zeros(0, 128, dtype=torch.bfloat16)
    values, kept = kernels_for(recipe).fake_quantize_activations(empty, static_scale=recipe.experts_in_scale(0))
    assert values.shape == (0, 128)
    assert kept.scales.shape == (0, 8)


def test_wrong_arguments_are_refused_by_name(recipe):
    kernels = kernels_for(recipe)
    scale = recipe.experts_in_scale(0)
    for call, field in [
        (lambda: kernels.quantize_activations(torch.zeros(2, 24), static_scale=scale), "x"),
        (lambda: kernels.quantize_activations(torch.zeros(128), static_scale=scale), "x"),
        (lambda: kernels.quantize_kv(torch.zeros(2, 64), global_scale=0.0), "global_scale"),
        (lambda: kernels.quantize_kv(torch.zeros(2, 48), global_scale=1.0, rotation=32), "rotation"),
        (lambda: kernels.fake_quantize_weight(torch.zeros(3, 64), parts=2), "weight"),
        (lambda: kernels.fake_quantize_weight(torch.zeros(64)), "weight"),
    ]:
        with pytest.raises(ShapeError) as caught:
            call()
        assert caught.value.field == field
