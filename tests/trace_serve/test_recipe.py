import dataclasses
import hashlib
import json
import subprocess
import sys

import pytest

from trace_serve.errors import RecipeError
from trace_serve.recipe import CHOICES, PRESETS, Recipe, load_recipe

ALTERNATIVES = {
    "experts": "w4a16",
    "expert_layers": (1, 2),
    "kv": "bf16",
    "kv_layers": (0,),
    "expert_rotation": 64,
    "k_rotation": 64,
    "activation_global_scale": "per_token",
    "weight_global_scale": "per_expert",
    "gate_up_scale": "split",
    "weight_tiles": "16x16",
    "kv_global_scale_log2": -3,
    "scale_formula": "amax_over_six",
    "weight_scale_formula": "s_times_amax_sixth",
    "kv_scale_formula": "amax_over_six_g",
    "reciprocal": "divide",
    "ties": "up",
    "zero_block": "min_subnormal",
    "four_over_six": "weights",
}
STATIC = {
    "activation_global_scale": "per_tensor_static",
    "experts_in_global_scale": (0.5, 0.25),
    "experts_mid_global_scale": (0.125,),
    "kv_global_scale": "static",
    "k_global_scale": (0.01,),
    "v_global_scale": (0.5,),
}


def test_the_id_is_the_hash_of_the_canonical_json():
    recipe = Recipe()
    text = json.dumps(recipe.to_dict(), sort_keys=True, separators=(",", ":"))
    assert recipe.recipe_id == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_the_ids_of_the_presets_are_those_that_policies_in_the_field_carry():
    assert {name: recipe.recipe_id.removeprefix("sha256:")[:16] for name, recipe in PRESETS.items()} == {
        "default": "be2b4007015828cb",
        "portable": "be2b4007015828cb",
        "bf16": "871637d23c478408",
        "gb200": "0011fa4734caf0e5",
        "paper": "30f28abe8fb5bd58",
    }


@pytest.mark.parametrize(("name", "value"), ALTERNATIVES.items())
def test_every_choice_that_can_vary_changes_the_id(name, value):
    changed = dataclasses.replace(Recipe(), **{name: value})
    assert changed.recipe_id != Recipe().recipe_id
    assert Recipe.from_dict(json.loads(changed.canonical_json())) == changed


def test_static_scales_and_a_lower_scale_maximum_change_the_id_too():
    static = Recipe(**STATIC)
    lower = Recipe(four_over_six="weights", global_scale_max=256)
    ids = {Recipe().recipe_id, static.recipe_id, lower.recipe_id, Recipe(four_over_six="weights").recipe_id}
    assert len(ids) == 4
    for recipe in (static, lower):
        assert Recipe.from_dict(json.loads(recipe.canonical_json())) == recipe


def test_numbers_that_are_equal_give_one_id():
    assert (
        Recipe(four_over_six="weights", global_scale_max=256).recipe_id
        == Recipe(four_over_six="weights", global_scale_max=256.0).recipe_id
    )
    whole = {**STATIC, "k_global_scale": (1,), "v_global_scale": (2,)}
    fractional = {**STATIC, "k_global_scale": (1.0,), "v_global_scale": (2.0,)}
    assert Recipe(**whole).recipe_id == Recipe(**fractional).recipe_id


def test_every_choice_is_part_of_the_id():
    assert set(Recipe().to_dict()) == {field.name for field in dataclasses.fields(Recipe)}
    assert set(CHOICES) <= set(Recipe().to_dict())


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"tiez": "even"}, "tiez"),
        ({"ties": "odd"}, "ties"),
        ({"zero_block": None}, "zero_block"),
        ({"scale_formula": ["amax_over_six"]}, "scale_formula"),
        ({"reciprocal": "approx_ftz"}, "reciprocal"),
        ({"experts": None}, "experts"),
        ({"expert_rotation": 24}, "expert_rotation"),
        ({"expert_rotation": True}, "expert_rotation"),
        ({"expert_layers": []}, "expert_layers"),
        ({"expert_layers": [2, 1]}, "expert_layers"),
        ({"expert_layers": [1, 1]}, "expert_layers"),
        ({"kv_layers": [-1]}, "kv_layers"),
        ({"kv_layers": 3}, "kv_layers"),
        ({"kv_global_scale_log2": 33}, "kv_global_scale_log2"),
        ({"kv_global_scale_log2": 1.0}, "kv_global_scale_log2"),
        ({"global_scale_max": 256.0}, "global_scale_max"),
        ({"global_scale_max": 100.0, "four_over_six": "weights"}, "global_scale_max"),
        ({"global_scale_max": True}, "global_scale_max"),
        ({"experts": "bf16", "expert_rotation": 16}, "experts"),
        ({"experts": "bf16", "four_over_six": "weights"}, "four_over_six"),
        ({"experts": "w4a16", "four_over_six": "experts"}, "four_over_six"),
        ({"experts": "bf16", "weight_tiles": "16x16"}, "weight_tiles"),
        ({"four_over_six": "weights", "weight_tiles": "16x16"}, "weight_tiles"),
        ({"zero_block": "saturate", "reciprocal": "divide"}, "zero_block"),
        ({"activation_global_scale": "per_tensor_static"}, "experts_in_global_scale"),
        ({"experts_mid_global_scale": [1.0]}, "experts_mid_global_scale"),
        ({"kv_global_scale": "static", "k_global_scale": [1.0]}, "v_global_scale"),
        ({"k_global_scale": [1.0]}, "k_global_scale"),
        ({**STATIC, "v_global_scale": [0.0]}, "v_global_scale"),
        ({**STATIC, "v_global_scale": [float("nan")]}, "v_global_scale"),
        ({**STATIC, "v_global_scale": []}, "v_global_scale"),
        ({**STATIC, "v_global_scale": 1.0}, "v_global_scale"),
        ({**STATIC, "v_global_scale": ["1"]}, "v_global_scale"),
        ({**STATIC, "kv_global_scale_log2": 1}, "kv_global_scale_log2"),
        ({**STATIC, "experts": "w4a16"}, "experts_in_global_scale"),
        ({"kv": "bf16", "kv_layers": [1]}, "kv"),
        ([], "recipe"),
    ],
)
def test_a_bad_choice_is_refused_by_name(raw, field):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(raw)
    assert caught.value.field == field


def test_layers_select_what_is_quantized():
    recipe = Recipe(expert_layers=(1, 3), kv="bf16")
    assert [recipe.quantizes_experts(i) for i in range(4)] == [False, True, False, True]
    assert not any(recipe.quantizes_kv(i) for i in range(4))
    assert Recipe().quantizes_kv(99)
    assert PRESETS["bf16"].is_bf16
    assert not recipe.is_bf16


def test_the_hardware_reciprocal_is_refused_with_the_reason():
    with pytest.raises(RecipeError, match=r"own approximation.*FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1"):
        Recipe(reciprocal="approx_ftz")


def test_static_scales_are_read_by_layer():
    recipe = Recipe(**STATIC)
    assert [recipe.experts_in_scale(layer) for layer in (0, 1)] == [0.5, 0.25]
    assert [recipe.experts_mid_scale(layer) for layer in (0, 7)] == [0.125, 0.125]
    assert recipe.kv_scales(5) == (0.01, 0.5)
    with pytest.raises(RecipeError, match="has 2 scales, layer 2 needs one"):
        recipe.experts_in_scale(2)
    assert Recipe().experts_in_scale(3) is None
    assert Recipe(kv_global_scale_log2=-3).kv_scales(3) == (0.125, 0.125)


@pytest.mark.parametrize(
    ("choices", "exact"),
    [
        ({}, True),
        ({"activation_global_scale": "per_token"}, False),
        ({"activation_global_scale": "per_token", "experts": "w4a16"}, True),
        ({"weight_global_scale": "per_expert"}, False),
        ({"weight_global_scale": "per_expert", "experts": "bf16"}, True),
        (STATIC, False),
        ({**STATIC, "k_global_scale": (0.25,)}, True),
        ({**STATIC, "k_global_scale": (0.25,), "experts_in_global_scale": (0.5, 0.3)}, False),
    ],
)
def test_bf16_is_exact_where_every_global_scale_is_a_power_of_two(choices, exact):
    assert Recipe(**choices).exact_in_bf16 is exact


def test_presets():
    assert PRESETS["portable"] == PRESETS["default"] == Recipe()
    assert not PRESETS["gb200"].exact_in_bf16
    assert not PRESETS["paper"].exact_in_bf16
    assert PRESETS["bf16"].exact_in_bf16
    assert len({recipe.recipe_id for recipe in PRESETS.values()}) == len(PRESETS) - 1


def test_a_recipe_comes_from_a_preset_or_a_file(tmp_path):
    assert load_recipe("default") == Recipe()
    path = tmp_path / "recipe.json"
    path.write_text('{"expert_rotation": 64}')
    assert load_recipe(str(path)) == Recipe(expert_rotation=64)
    path.write_text("{")
    with pytest.raises(RecipeError, match="not JSON"):
        load_recipe(str(path))
    with pytest.raises(RecipeError, match="not a preset"):
        load_recipe(str(tmp_path / "none"))


def test_a_recipe_needs_no_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, trace_serve.recipe; assert 'torch' not in sys.modules"], check=True
    )
