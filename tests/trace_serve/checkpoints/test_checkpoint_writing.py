"""What policy build packs is what an engine would round, and public readers read it as such."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
from expert_model import EXPERTS, FAMILIES, LAYERS, expert_module, expert_weights, read_tensors, write_expert_model
from packed_policies import POW2, RECIPES, STATIC, ByModelOpt, build
from safetensors.torch import save_file
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import PolicyError
from trace_serve.kernels import kernels_for
from trace_serve.policy import build_policy, digest_directory, load_policy
from trace_serve.recipe import PRESETS, Recipe


def values(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The matrix of ModelOpt's tensors by the definition, in fp32."""
    codes, scales = (tensors[f"{module}.{part}"] for part in ("weight", "weight_scale"))
    blocks = nvfp4.unpack_values(codes).reshape(*scales.shape, 16) * scales.float().unsqueeze(-1)
    return blocks.flatten(1) * tensors[f"{module}.weight_scale_2"]


def compressed_tensors_values(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The matrix as compressed-tensors' own class reads it."""
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    state = {part: tensors[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale")}
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"]


def engine_image(recipe: Recipe, weights: dict[str, Tensor], family: str, module: str) -> Tensor:
    """What an engine under the recipe makes of one matrix when it loads the BF16 model, in fp32."""
    gate = module.replace("w3", "w1").replace("up_proj", "gate_proj")
    up = gate.replace("w1", "w3").replace("gate_proj", "up_proj")
    together = [module] if up == gate else [gate, up]
    matrix = torch.cat([weights[name] for name in together])
    kept = nvfp4.dequantize(nvfp4.quantize_weight(matrix, recipe, parts=len(together)), torch.float32)
    if recipe.exact_in_bf16:
        image = kernels_for(recipe, "cpu").fake_quantize_weight(matrix, parts=len(together))
        torch.testing.assert_close(image.float(), kept, rtol=0, atol=0)
    return kept.chunk(len(together))[together.index(module)]


@pytest.mark.parametrize("name", RECIPES)
def test_modelopts_reader_sees_the_weights_that_an_engine_rounds_to(by_modelopt: ByModelOpt, name: str) -> None:
    weights = expert_weights("mixtral")
    assert by_modelopt.values[name].keys() == weights.keys()
    for module, seen in by_modelopt.values[name].items():
        expected = engine_image(RECIPES[name], weights, "mixtral", module)
        # Their reader multiplies the two scales first, which rounds another way unless one is a power of two.
        rtol = 0 if RECIPES[name].weight_global_scale == "pow2_per_expert" else 2.0**-22
        torch.testing.assert_close(seen, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_config_json_says_what_modelopts_exporter_would_derive(by_modelopt: ByModelOpt, name: str) -> None:
    config = json.loads((by_modelopt.policies[name] / "config.json").read_text())
    assert config["quantization_config"] == by_modelopt.configs[name]


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].weight_global_scale == "pow2_per_expert"])
def test_compressed_tensors_reader_sees_the_same_weights(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    out = build(write_expert_model(tmp_path / "model"), tmp_path / "policy", recipe, "compressed-tensors")
    tensors, weights = read_tensors(out), expert_weights("mixtral")
    for module in weights:
        expected = engine_image(recipe, weights, "mixtral", module)
        # Their reader works in bfloat16, which holds these values exactly.
        torch.testing.assert_close(compressed_tensors_values(tensors, module).float(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 2])
def test_every_family_and_sharding_packs_to_the_same_codes(tmp_path: Path, family: str, shards: int) -> None:
    source = write_expert_model(tmp_path / "model", family, shards=shards)
    tensors = read_tensors(build(source, tmp_path / "policy", POW2, "modelopt"))
    weights = expert_weights(family)
    for module in weights:
        expected = engine_image(POW2, weights, family, module)
        torch.testing.assert_close(values(tensors, module), expected, rtol=0, atol=0)
    gate, up = (tensors[f"{expert_module(family, 1, 2, p)}.weight_scale_2"] for p in ("gate", "up"))
    assert gate == up
    packed = {f"{module}.weight" for module in weights}
    for name, tensor in read_tensors(source).items():
        if name not in packed:
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)


def test_fused_experts_are_packed_one_by_one(tmp_path: Path) -> None:
    recipe = Recipe(expert_layers=(1,))
    source = write_expert_model(tmp_path / "model", "qwen3_moe", shards=1)
    expected = read_tensors(build(source, tmp_path / "expected", recipe, "modelopt"))
    weights = expert_weights("qwen3_moe")
    tensors = {name: t for name, t in read_tensors(source).items() if ".experts." not in name}
    for layer in range(LAYERS):
        gate, up, down = (
            torch.stack([weights[expert_module("qwen3_moe", layer, e, p)] for e in range(EXPERTS)])
            for p in ("gate", "up", "down")
        )
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = build(source, tmp_path / "policy", recipe, "modelopt")
    packed = read_tensors(out)
    kept = {name for name in packed if name not in expected}
    assert kept == {f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    for name, tensor in expected.items():
        if "layers.0.mlp.experts" not in name:
            assert torch.equal(packed[name].float(), tensor.float()), name
    excluded = json.loads((out / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert [name for name in excluded if "experts" in name] == ["model.layers.0.mlp.experts*"]


def test_tensors_have_the_layouts_dtypes_and_shapes(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    module = expert_module("mixtral", 0, 1, "down")
    modelopt = read_tensors(build(source, tmp_path / "m", STATIC, "modelopt"))
    packed = read_tensors(build(source, tmp_path / "c", STATIC, "compressed-tensors"))

    def described(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        own = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
        return {part: (t.dtype, tuple(t.shape)) for part, t in own.items()}

    assert described(modelopt) == {
        "weight": (torch.uint8, (64, 48)),
        "weight_scale": (torch.float8_e4m3fn, (64, 6)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    }
    assert described(packed) == {
        "weight_packed": (torch.uint8, (64, 48)),
        "weight_scale": (torch.float8_e4m3fn, (64, 6)),
        "weight_global_scale": (torch.float32, (1,)),
        "input_global_scale": (torch.float32, (1,)),
    }
    assert modelopt[f"{module}.input_scale"] == 0.125
    assert packed[f"{module}.input_global_scale"] == 8.0
    assert modelopt[f"{expert_module('mixtral', 1, 0, 'gate')}.input_scale"] == 0.5
    assert modelopt[f"{module}.weight_scale_2"] * packed[f"{module}.weight_global_scale"] == 1.0


def test_configs_declare_the_format_and_what_is_left_out_of_it(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    out = build(source, tmp_path / "m", POW2, "modelopt")
    nested = json.loads((out / "hf_quant_config.json").read_text())
    assert nested["quantization"]["quant_algo"] == "NVFP4"
    assert nested["quantization"]["kv_cache_quant_algo"] == "NVFP4"
    assert "lm_head" in nested["quantization"]["exclude_modules"]
    assert "model.layers.1.self_attn*" in nested["quantization"]["exclude_modules"]
    weights_only = build(source, tmp_path / "w", RECIPES["weights only"], "modelopt")
    nested = json.loads((weights_only / "hf_quant_config.json").read_text())
    assert nested["quantization"]["quant_algo"] == "W4A16_NVFP4"

    section = json.loads((build(source, tmp_path / "c", POW2, "compressed-tensors") / "config.json").read_text())
    parsed = QuantizationConfig.model_validate(section["quantization_config"])
    assert parsed.config_groups["group_0"].weights == preset_name_to_scheme("NVFP4", ["Linear"]).weights
    assert parsed.config_groups["group_0"].input_activations == preset_name_to_scheme("NVFP4", []).input_activations
    assert parsed.quantization_status is QuantizationStatus.COMPRESSED
    assert "model.layers.0.self_attn.q_proj" in (parsed.ignore or [])


def test_layers_that_the_recipe_keeps_stay_bf16_and_are_excluded(tmp_path: Path) -> None:
    recipe = Recipe(expert_layers=(1,))
    source = write_expert_model(tmp_path / "model")
    out = build(source, tmp_path / "policy", recipe, "modelopt")
    tensors, before = read_tensors(out), read_tensors(source)
    kept = expert_module("mixtral", 0, 0, "gate")
    torch.testing.assert_close(tensors[f"{kept}.weight"], before[f"{kept}.weight"], rtol=0, atol=0)
    assert tensors[f"{expert_module('mixtral', 1, 0, 'gate')}.weight"].dtype == torch.uint8
    excluded = json.loads((out / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert [name for name in excluded if "experts" in name] == ["model.layers.0.block_sparse_moe.experts*"]
    packed = build(source, tmp_path / "packed", recipe, "compressed-tensors")
    ignored = json.loads((packed / "config.json").read_text())["quantization_config"]["ignore"]
    (expression,) = [name for name in ignored if "experts" in name]
    assert re.fullmatch(expression.removeprefix("re:"), kept)
    assert not re.fullmatch(expression.removeprefix("re:"), expert_module("mixtral", 1, 0, "gate"))


def test_a_packed_policy_has_its_own_digest_and_the_base_of_its_model(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    plain = build(source, tmp_path / "plain", POW2, "bf16")
    out = build(source, tmp_path / "policy", POW2, "modelopt")
    policy = load_policy(out)
    assert policy.base_digest == load_policy(plain).base_digest == digest_directory(source)
    assert policy.digest == digest_directory(out) != digest_directory(plain)
    assert (policy.format, policy.manifest.packed_by) == ("modelopt", "recipe")
    assert policy.manifest.files_digest == digest_directory(out, exclude=("policy.json",))
    # 4 bits and one scale byte a 16 values, two fp32 numbers a matrix.
    expert_values = LAYERS * EXPERTS * 3 * 64 * 96
    saved = load_policy(plain).weight_bytes - policy.weight_bytes
    assert saved == expert_values * 2 - (expert_values * 9 // 16 + LAYERS * EXPERTS * 3 * 8)
    again = build_policy(source, out, name="p", version="1", recipe=POW2, weights="modelopt")
    assert again.digest == policy.digest
    with pytest.raises(PolicyError, match="format"):
        build(source, out, POW2, "bf16")
    (out / "extra.txt").write_text("x")
    with pytest.raises(PolicyError, match="were altered"):
        build(source, out, POW2, "modelopt")


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (PRESETS["bf16"], "format"),
        (Recipe(expert_rotation=16), "expert_rotation"),
        (Recipe(gate_up_scale="split"), "gate_up_scale"),
    ],
)
def test_what_other_engines_would_misread_is_not_written(
    tmp_path: Path, layout: str, recipe: Recipe, field: str
) -> None:
    source = write_expert_model(tmp_path / "model")
    with pytest.raises(PolicyError, match=f"format {layout}") as caught:
        build(source, tmp_path / "policy", recipe, layout)
    assert caught.value.field == field
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_reciprocal_that_loses_the_scale_is_not_written(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    uneven = Recipe(
        activation_global_scale="per_tensor_static",
        experts_in_global_scale=(0.3,),
        experts_mid_global_scale=(0.5,),
    )
    for recipe, field in [(PRESETS["gb200"], "weight_global_scale"), (uneven, "experts_in_global_scale")]:
        with pytest.raises(PolicyError, match="stores 1 / g") as caught:
            build(source, tmp_path / "policy", recipe, "compressed-tensors")
        assert caught.value.field == field


def test_weights_that_are_not_finite_are_named_and_leave_nothing(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model", shards=1)
    tensors = read_tensors(source)
    name = f"{expert_module('mixtral', 1, 2, 'down')}.weight"
    tensors[name][4, 4] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=name.replace(".", r"\.")):
        build(source, tmp_path / "policy", POW2, "modelopt")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model", shards=1)
    tensors = read_tensors(source)
    name = f"{expert_module('mixtral', 0, 1, 'up')}.weight"
    del tensors[name]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=name.replace(".", r"\.")):
        build(source, tmp_path / "policy", POW2, "modelopt")


def test_memory_does_not_grow_with_the_number_of_experts(tmp_path: Path) -> None:
    from trace_serve.checkpoints.shards import ShardWriter
    from trace_serve.policy.weights import TensorInfo

    held = 1 << 20
    infos = {f"t{i}": TensorInfo("x", "U8", (held,)) for i in range(16)}
    tracemalloc.start()
    with ShardWriter(tmp_path / "x.safetensors", infos) as writer:
        for name in infos:
            writer.write(name, torch.ones(held, dtype=torch.uint8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * held
    assert (tmp_path / "x.safetensors").stat().st_size > 16 * held
