"""Packed policies on the command line and in policy.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expert_model import read_tensors, write_expert_model
from packed_policies import POW2, STATIC, build
from safetensors.torch import save_file
from typer.testing import CliRunner

from trace_serve.errors import PolicyError
from trace_serve.policy import load_policy
from trace_serve.policy.cli import app
from trace_serve.recipe import Recipe

RUNNER = CliRunner()


def kv_entry(policy: Path) -> object:
    return json.loads((policy / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"]


def notes(policy: Path) -> list[str]:
    shown = RUNNER.invoke(app, ["inspect", str(policy), "--json"])
    assert shown.exit_code == 0, shown.output
    found: list[str] = json.loads(shown.output)["notes"]
    return found


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_build_says_what_the_layout_cannot_and_inspect_shows_it(tmp_path: Path, layout: str) -> None:
    source = write_expert_model(tmp_path / "model")
    built = RUNNER.invoke(app, ["build", str(source), "--out", str(tmp_path / "p"), "--format", layout])
    assert built.exit_code == 0, built.output
    assert "packing model-00001-of-00002.safetensors" in built.output
    shown = json.loads(RUNNER.invoke(app, ["inspect", str(tmp_path / "p"), "--json"]).output)
    assert (shown["format"], shown["packed_by"]) == (layout, "recipe")
    assert any("activation scales from each token" in note for note in shown["notes"])
    for note in shown["notes"]:
        assert f"note: {note}" in built.output


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    result = RUNNER.invoke(app, ["build", str(source), "--out", str(tmp_path / "p"), "--format", "gguf"])
    assert isinstance(result.exception, PolicyError)
    assert "bf16, modelopt, compressed-tensors" in str(result.exception)


def test_values_lost_in_rounding_are_counted(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model", shards=1)
    tensors = read_tensors(source)
    name = next(name for name in tensors if ".experts." in name)
    tensors[name][8, :16] = 1e-9
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    built = RUNNER.invoke(app, ["build", str(source), "--out", str(tmp_path / "p"), "--format", "modelopt"])
    assert "underflow_blocks" in built.output


@pytest.mark.parametrize(
    ("recipe", "entry"),
    [
        (POW2, "NVFP4"),
        (Recipe(kv="bf16"), None),
        (Recipe(k_rotation=16), None),
        (Recipe(kv_layers=(1,)), None),
        (Recipe(kv_global_scale_log2=-2), None),
    ],
)
def test_the_kv_cache_is_declared_only_where_the_entry_says_what_the_recipe_says(
    tmp_path: Path, recipe: Recipe, entry: str | None
) -> None:
    out = build(write_expert_model(tmp_path / "model"), tmp_path / "policy", recipe, "modelopt")
    assert kv_entry(out) == entry
    assert any("KV cache" in note for note in notes(out)) == (recipe.kv == "nvfp4" and entry is None)


def test_static_input_scales_need_no_note(tmp_path: Path) -> None:
    assert notes(build(write_expert_model(tmp_path / "model"), tmp_path / "policy", STATIC, "modelopt")) == []


def test_policy_json_cannot_claim_another_format(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    for weights, claim in (("modelopt", "bf16"), ("bf16", "modelopt"), ("modelopt", "compressed-tensors")):
        out = build(source, tmp_path / f"{weights}-{claim}", POW2, weights)
        manifest = json.loads((out / "policy.json").read_text())
        (out / "policy.json").write_text(json.dumps({**manifest, "format": claim}))
        with pytest.raises(PolicyError) as caught:
            load_policy(out)
        assert caught.value.field == "format"


def test_a_policy_from_before_formats_is_a_bf16_one(tmp_path: Path) -> None:
    out = build(write_expert_model(tmp_path / "model"), tmp_path / "policy", POW2, "bf16")
    manifest = json.loads((out / "policy.json").read_text())
    for key in ("format", "files_digest", "packed_by"):
        del manifest[key]
    (out / "policy.json").write_text(json.dumps(manifest))
    assert load_policy(out).format == "bf16"
    assert build(tmp_path / "model", out, POW2, "bf16") == out
