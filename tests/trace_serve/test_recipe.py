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
    "kv_global_scale_log2": -3,
}


def test_the_id_is_the_hash_of_the_canonical_json():
    recipe = Recipe()
    text = json.dumps(recipe.to_dict(), sort_keys=True, separators=(",", ":"))
    assert recipe.recipe_id == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("name", "value"), ALTERNATIVES.items())
def test_every_choice_that_can_vary_changes_the_id(name, value):
    changed = dataclasses.replace(Recipe(), **{name: value})
    assert changed.recipe_id != Recipe().recipe_id
    assert Recipe.from_dict(json.loads(changed.canonical_json())) == changed


def test_every_choice_is_part_of_the_id():
    assert set(Recipe().to_dict()) == {field.name for field in dataclasses.fields(Recipe)}
    assert set(CHOICES) <= set(Recipe().to_dict())


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"tiez": "even"}, "tiez"),
        ({"ties": "up"}, "ties"),
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
        ({"experts": "bf16", "expert_rotation": 16}, "experts"),
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
