import json
import subprocess
import sys

import pytest
from tiny_model import write_tiny_model

from trace_serve.errors import PolicyError, RecipeError
from trace_serve.policy import build_policy, digest_directory, load_policy
from trace_serve.recipe import PRESETS, Recipe

DEFAULT = PRESETS["default"]


def build(model, out, **changes):
    return build_policy(model, out, **{"name": "p", "version": "1", "recipe": DEFAULT} | changes)


def test_a_policy_is_the_model_and_its_manifest(model, tmp_path):
    policy = build(model, tmp_path / "policy", source_run="run-7")
    assert {f.name for f in policy.path.iterdir()} == {f.name for f in model.iterdir()} | {"policy.json"}
    for file in model.iterdir():
        assert (policy.path / file.name).read_bytes() == file.read_bytes()
    assert policy.base_digest == digest_directory(model)
    assert policy.digest == digest_directory(policy.path)
    assert (policy.name, policy.version, policy.source_run) == ("p", "1", "run-7")
    assert policy.recipe == DEFAULT
    assert policy.recipe_id == DEFAULT.recipe_id
    assert policy.model_config["hidden_size"] == 64
    assert policy.weight_bytes == 8 * 4 + 6 * 2
    assert load_policy(policy.path) == policy


def test_building_again_returns_the_same_policy(model, tmp_path):
    first = build(model, tmp_path / "policy")
    assert build(model, tmp_path / "policy").digest == first.digest


def test_another_policy_is_never_overwritten(model, tmp_path):
    out = build(model, tmp_path / "policy").path
    before = digest_directory(out)
    with pytest.raises(PolicyError, match=r"another policy \(version differ\)"):
        build(model, out, version="2")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PolicyError, match=r"policy\.json"):
        build(model, tmp_path / "file")
    assert digest_directory(out) == before


def test_an_altered_copy_is_not_taken_for_the_same_policy(model, tmp_path):
    out = build(model, tmp_path / "policy").path
    (out / "extra.txt").write_text("x")
    with pytest.raises(PolicyError, match="were altered"):
        build(model, out)


def test_a_failed_build_leaves_nothing(model, tmp_path):
    before = sorted(tmp_path.iterdir())
    for changes in ({"name": "a b"}, {"version": ""}, {"recipe": Recipe(expert_layers=(5,))}):
        with pytest.raises(PolicyError):
            build(model, tmp_path / "policy", **changes)
    with pytest.raises(PolicyError, match="parent directory"):
        build(model, tmp_path / "none" / "policy")
    with pytest.raises(PolicyError, match="inside the source"):
        build(model, model / "policy")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("config", "recipe", "field"),
    [
        ({"model_type": "llama"}, DEFAULT, "model_type"),
        ({"hidden_size": 72}, DEFAULT, "experts"),
        ({"intermediate_size": 88}, DEFAULT, "experts"),
        ({"head_dim": 24}, DEFAULT, "kv"),
        ({}, Recipe(expert_rotation=64), "expert_rotation"),
        ({}, Recipe(k_rotation=32), "k_rotation"),
        ({}, Recipe(expert_layers=(0, 2)), "expert_layers"),
        ({}, Recipe(kv_layers=(2,)), "kv_layers"),
        ({"num_hidden_layers": 0}, DEFAULT, "num_hidden_layers"),
        ({"vocab_size": None}, DEFAULT, "vocab_size"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(tmp_path, config, recipe, field):
    model = write_tiny_model(tmp_path / "model", **config)
    with pytest.raises(PolicyError) as caught:
        build(model, tmp_path / "policy", recipe=recipe)
    assert caught.value.field == field


def test_odd_dimensions_are_fine_where_nothing_is_quantized(tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden_size=72, head_dim=18)
    assert build(model, tmp_path / "policy", recipe=PRESETS["bf16"]).recipe.is_bf16


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_the_wrong_length_is_named(model, tmp_path, change):
    out = build(model, tmp_path / "policy").path
    shard = out / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] if change < 0 else data + b"\0")
    with pytest.raises(PolicyError, match="model-00002-of-00002") as caught:
        load_policy(out)
    assert caught.value.field == shard.name


def test_weights_that_do_not_match_their_index_are_refused(model, tmp_path):
    index = model / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    shard = "model-00001-of-00002.safetensors"
    for weight_map, message in [
        ({**original["weight_map"], "c.weight": shard}, "'c.weight' is not in"),
        ({"a.weight": shard}, "'b.weight' of model-00002"),
        ({**original["weight_map"], "b.weight": "model-00003.safetensors"}, "model-00003"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(PolicyError, match=message):
            build(model, tmp_path / "policy")
    index.unlink()
    with pytest.raises(PolicyError, match="2 shards without"):
        build(model, tmp_path / "policy")
    for file in model.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(PolicyError, match="no weights"):
        build(model, tmp_path / "policy")


def edit(key, value):
    def change(raw):
        raw[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (edit("extra", 1), "extra"),
        (edit("schema_version", 2), "schema_version"),
        (edit("schema_version", "1"), "schema_version"),
        (edit("recipe_id", "sha256:" + "0" * 64), "recipe_id"),
        (edit("recipe_id", "abc"), "recipe_id"),
        (edit("tokenizer_digest", "sha256:" + "0" * 64), "tokenizer_digest"),
        (edit("chat_template_digest", "sha256:" + "0" * 64), "chat_template_digest"),
        (lambda raw: raw.pop("base_digest"), "base_digest"),
    ],
)
def test_an_edited_manifest_is_refused_by_key(model, tmp_path, change, field):
    out = build(model, tmp_path / "policy").path
    raw = json.loads((out / "policy.json").read_text())
    change(raw)
    (out / "policy.json").write_text(json.dumps(raw))
    with pytest.raises(PolicyError) as caught:
        load_policy(out)
    assert caught.value.field == field


def test_a_changed_recipe_needs_its_own_id(model, tmp_path):
    out = build(model, tmp_path / "policy").path
    raw = json.loads((out / "policy.json").read_text())
    raw["recipe"]["expert_rotation"] = 16
    (out / "policy.json").write_text(json.dumps(raw))
    with pytest.raises(PolicyError, match="recipe_id"):
        load_policy(out)
    raw["recipe"]["ties"] = "odd"
    (out / "policy.json").write_text(json.dumps(raw))
    with pytest.raises(RecipeError, match="ties"):
        load_policy(out)


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_a_changed_tokenizer_or_template_is_refused(model, tmp_path, file):
    out = build(model, tmp_path / "policy").path
    (out / file).write_text("{}")
    with pytest.raises(PolicyError, match="restore the file"):
        load_policy(out)


def test_a_plain_directory_is_not_a_policy_and_a_policy_is_not_a_source(model, tmp_path):
    with pytest.raises(PolicyError, match="trace-serve policy build"):
        load_policy(model)
    out = build(model, tmp_path / "policy").path
    with pytest.raises(PolicyError, match="plain model directory"):
        build(out, tmp_path / "again")


def test_reading_a_policy_does_not_import_torch():
    code = "import sys, trace_serve.policy, trace_serve.policy.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
