"""Packed checkpoints read as the BF16 image they stand for, or are refused by the name of what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from expert_model import (
    FAMILIES,
    expert_module,
    expert_weights,
    read_tensors,
    rewrite,
    write_expert_model,
)
from packed_policies import POW2, RECIPES, STATIC, ByModelOpt, build
from safetensors.torch import save_file
from torch import Tensor

from trace_serve.checkpoints.reader import open_checkpoint
from trace_serve.errors import PolicyError
from trace_serve.kernels import kernels_for
from trace_serve.policy import build_policy, load_policy
from trace_serve.policy.packed import check_directory
from trace_serve.recipe import PRESETS, Recipe

EXACT = [name for name, recipe in RECIPES.items() if recipe.exact_in_bf16]
MODULE = expert_module("mixtral", 1, 2, "down")


def expanded(directory: Path, recipe: Recipe, *, order: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an engine's loader gets, and the images among it."""
    checkpoint = open_checkpoint(directory, recipe)
    assert checkpoint is not None
    images: dict[str, Tensor] = {}
    stored = list(read_tensors(directory).items())[::order]
    return dict(checkpoint.expand(stored, images.__setitem__)), images


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", EXACT)
def test_a_packed_policy_expands_to_what_an_engine_makes_of_the_bf16_one(
    tmp_path: Path, layout: str, name: str
) -> None:
    recipe = RECIPES[name]
    source = write_expert_model(tmp_path / "model")
    tensors, images = expanded(build(source, tmp_path / "policy", recipe, layout), recipe)
    plain = read_tensors(source)
    assert tensors.keys() == plain.keys()
    assert images.keys() == expert_weights("mixtral").keys()
    kernels = kernels_for(recipe, "cpu")
    for layer in range(2):
        for expert in range(3):
            gate, up, down = (expert_module("mixtral", layer, expert, p) for p in ("gate", "up", "down"))
            pair = torch.cat([plain[f"{gate}.weight"], plain[f"{up}.weight"]])
            rounded = kernels.fake_quantize_weight(pair, parts=2).chunk(2)
            assert torch.equal(tensors[f"{gate}.weight"], rounded[0])
            assert torch.equal(tensors[f"{up}.weight"], rounded[1])
            assert torch.equal(tensors[f"{down}.weight"], kernels.fake_quantize_weight(plain[f"{down}.weight"]))
    untouched = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors[untouched], plain[untouched])


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_order_of_every_family_are_read(tmp_path: Path, family: str) -> None:
    out = build(write_expert_model(tmp_path / "model", family), tmp_path / "policy", POW2, "modelopt")
    forwards, _ = expanded(out, POW2)
    backwards, _ = expanded(out, POW2, order=-1)
    assert forwards.keys() == backwards.keys()
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)


def third_party(directory: Path, tensors: dict[str, Tensor], section: dict[str, object]) -> Path:
    """A qwen3_moe directory with the given experts, as another tool would leave it."""
    write_expert_model(directory, "qwen3_moe", shards=1)
    rest = {name: t for name, t in read_tensors(directory).items() if ".experts." not in name}
    save_file(rest | tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return directory


def test_what_modelopt_writes_is_read_to_modelopts_own_values(tmp_path: Path, by_modelopt: ByModelOpt) -> None:
    stored = {name: t for name, t in by_modelopt.written.items() if not name.endswith(".values")}
    directory = third_party(tmp_path / "model", stored, by_modelopt.configs["pow2"])
    _, images = expanded(directory, POW2)
    assert len(images) == 18
    for module, image in images.items():
        assert torch.equal(image, by_modelopt.written[f"{module}.values"])


def compress(weight: Tensor) -> dict[str, Tensor]:
    """One matrix as compressed-tensors' own class packs it, under a power-of-two global scale."""
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    low, high = weight.min().float(), weight.max().float()
    global_scale = torch.exp2(torch.floor(torch.log2(generate_gparam(low, high))))
    blocks = weight.float().reshape(weight.shape[0], -1, 16)
    assert scheme.weights is not None
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale)
    state = {"weight": weight.float(), "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, scheme)


def test_what_compressed_tensors_writes_is_read_to_its_own_values(tmp_path: Path) -> None:
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    packed = {module: compress(weight) for module, weight in expert_weights("qwen3_moe").items()}
    stored = {f"{module}.{part}": t for module, state in packed.items() for part, t in state.items()}
    section = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    _, images = expanded(third_party(tmp_path / "model", stored, section), POW2)
    assert images.keys() == packed.keys()
    for module, image in images.items():
        assert torch.equal(image, NVFP4PackedCompressor.decompress(packed[module], scheme)["weight"].to(image.dtype))


def test_a_packed_source_is_copied_and_says_so(tmp_path: Path, by_modelopt: ByModelOpt) -> None:
    stored = {name: t for name, t in by_modelopt.written.items() if not name.endswith(".values")}
    source = third_party(tmp_path / "model", stored, by_modelopt.configs["pow2"])
    policy = build_policy(source, tmp_path / "out", name="p", version="1", recipe=POW2, weights="modelopt")
    assert policy.manifest.packed_by == "source"
    assert (policy.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for weights in ("bf16", "compressed-tensors"):
        with pytest.raises(PolicyError, match="modelopt already"):
            build_policy(source, tmp_path / "other", name="p", version="1", recipe=POW2, weights=weights)
    for recipe in (PRESETS["bf16"], Recipe(expert_rotation=16)):
        with pytest.raises(PolicyError):
            build_policy(source, tmp_path / "other", name="p", version="1", recipe=recipe, weights="modelopt")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("packed")
    source = write_expert_model(root / "model")
    return {layout: build(source, root / layout, POW2, layout) for layout in ("modelopt", "compressed-tensors")}


Damage = Callable[[Tensor], Tensor | None]


def nan_scale(scales: Tensor) -> Tensor:
    scales.view(torch.uint8)[2, 1] = 0x7F
    return scales


def negative_scale(scales: Tensor) -> Tensor:
    scales.view(torch.uint8)[0, 0] |= 0x80
    return scales


HEADERS: list[tuple[str, Damage, str]] = [
    ("codes", lambda t: t[:, :-8].contiguous(), "holds a matrix"),
    ("codes", lambda t: t.to(torch.int32), "expected U8"),
    ("codes", lambda t: t.flatten(), "2 dimensions"),
    ("codes", lambda t: None, "missing"),
    ("scales", lambda t: t[:, :-1].contiguous(), "one scale per 16 values"),
    ("scales", lambda t: t.float(), "expected F8_E4M3"),
    ("scales", lambda t: None, "missing"),
    ("global_scale", lambda t: t.to(torch.bfloat16), "one F32 number"),
    ("global_scale", lambda t: torch.ones(2), "one F32 number"),
    ("global_scale", lambda t: None, "missing"),
    ("input_scale", lambda t: torch.ones(3), "one F32 number"),
]
DATA: list[tuple[str, Damage, str]] = [
    ("scales", nan_scale, "1 block scales are NaN, the first at \\[2, 1\\]"),
    ("scales", negative_scale, "negative"),
    ("global_scale", torch.zeros_like, "positive finite"),
    ("global_scale", torch.neg, "positive finite"),
    ("global_scale", lambda t: t * float("nan"), "positive finite"),
    ("global_scale", lambda t: t * float("inf"), "positive finite"),
    ("global_scale", lambda t: t * 1.7, "not a power of two"),
]


def damaged(packed: dict[str, Path], layout: str, part: str, damage: Damage, out: Path) -> tuple[Path, str]:
    from trace_serve.policy.layouts import LAYOUTS

    shutil.copytree(packed[layout], out)
    name = f"{MODULE}.{getattr(LAYOUTS[layout], part)}"
    rewrite(out, name, damage(read_tensors(out)[name]))
    return out, name


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("part", "damage", "message"), HEADERS)
def test_damage_in_headers_is_refused_by_name_without_reading_data(
    tmp_path: Path, packed: dict[str, Path], layout: str, part: str, damage: Damage, message: str
) -> None:
    directory, name = damaged(packed, layout, part, damage, tmp_path / "policy")
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(directory)
    assert name in str(caught.value)
    with pytest.raises(PolicyError, match=message):
        open_checkpoint(directory, POW2)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("part", "damage", "message"), DATA)
def test_damaged_scales_are_refused_by_name_before_the_first_tensor(
    tmp_path: Path, packed: dict[str, Path], layout: str, part: str, damage: Damage, message: str
) -> None:
    directory, name = damaged(packed, layout, part, damage, tmp_path / "policy")
    with pytest.raises(PolicyError, match=message) as caught:
        open_checkpoint(directory, POW2)
    assert caught.value.field == name


def test_a_scale_that_bf16_can_hold_is_read_although_it_is_no_power_of_two(
    tmp_path: Path, packed: dict[str, Path]
) -> None:
    directory, _ = damaged(packed, "modelopt", "global_scale", lambda t: t * 1.5, tmp_path / "policy")
    before, _ = expanded(packed["modelopt"], POW2)
    after, _ = expanded(directory, POW2)
    assert torch.equal(after[f"{MODULE}.weight"].float(), before[f"{MODULE}.weight"].float() * 1.5)


@pytest.mark.parametrize("layout", ["bf16", "modelopt"])
def test_a_truncated_shard_is_named(tmp_path: Path, layout: str) -> None:
    out = build(write_expert_model(tmp_path / "model"), tmp_path / "policy", POW2, layout)
    shard = out / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    for refuse in (load_policy, lambda path: open_checkpoint(path, POW2), lambda path: check_directory(path, POW2)):
        with pytest.raises(PolicyError, match="model-00002-of-00002") as caught:
            refuse(out)
        assert caught.value.field == shard.name


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (PRESETS["bf16"], "experts"),
        (Recipe(expert_rotation=16), "expert_rotation"),
        (Recipe(expert_layers=(0,)), "expert_layers"),
    ],
)
def test_a_recipe_that_contradicts_the_checkpoint_is_refused(
    packed: dict[str, Path], recipe: Recipe, field: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        check_directory(packed["modelopt"], recipe)
    assert caught.value.field == field


def test_a_layer_in_bf16_that_the_recipe_quantizes_is_refused(tmp_path: Path) -> None:
    out = build(write_expert_model(tmp_path / "model"), tmp_path / "policy", Recipe(expert_layers=(1,)), "modelopt")
    assert check_directory(out, Recipe(expert_layers=(1,))) is not None
    with pytest.raises(PolicyError, match=r"layers\.0\..*is not packed"):
        check_directory(out, POW2)


def test_weights_only_and_quantized_inputs_are_not_confused(tmp_path: Path) -> None:
    source = write_expert_model(tmp_path / "model")
    for layout in ("modelopt", "compressed-tensors"):
        weights_only = build(source, tmp_path / f"16-{layout}", Recipe(experts="w4a16"), layout)
        with pytest.raises(PolicyError, match="keeps inputs in BF16"):
            check_directory(weights_only, POW2)
        both = build(source, tmp_path / f"4-{layout}", POW2, layout)
        assert check_directory(both, Recipe(experts="w4a16")) is not None


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_static_input_scales_must_be_the_recipes(tmp_path: Path, layout: str) -> None:
    out = build(write_expert_model(tmp_path / "model"), tmp_path / "policy", STATIC, layout)
    assert open_checkpoint(out, STATIC) is not None
    assert STATIC.experts_in_global_scale is not None
    other = Recipe(
        activation_global_scale="per_tensor_static",
        experts_in_global_scale=STATIC.experts_in_global_scale,
        experts_mid_global_scale=(0.25,),
    )
    with pytest.raises(PolicyError, match=r"0\.125, the recipe says 0\.25"):
        open_checkpoint(out, other)


def config_with(directory: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("layout", "key", "value", "field"),
    [
        ("modelopt", "quant_algo", "FP8", "quant_algo"),
        ("modelopt", "quant_algo", "NVFP4_AWQ", "quant_algo"),
        ("modelopt", "group_size", 32, "group_size"),
        ("modelopt", "quant_method", "gptq", "quant_method"),
        ("compressed-tensors", "format", "pack-quantized", None),
        ("compressed-tensors", "config_groups", {}, None),
    ],
)
def test_other_quantizations_are_refused_by_key(
    tmp_path: Path, packed: dict[str, Path], layout: str, key: str, value: object, field: str | None
) -> None:
    out = tmp_path / "policy"
    shutil.copytree(packed[layout], out)

    def change(section: dict[str, object]) -> None:
        section[key] = value
        if key == "format":
            section["config_groups"]["group_0"]["format"] = value  # type: ignore[index]

    config_with(out, change)
    with pytest.raises(PolicyError) as caught:
        check_directory(out, POW2)
    assert field is None or caught.value.field == field


def test_hf_quant_config_alone_is_enough(tmp_path: Path, packed: dict[str, Path]) -> None:
    out = tmp_path / "policy"
    shutil.copytree(packed["modelopt"], out)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    assert check_directory(out, POW2) is not None
    (out / "hf_quant_config.json").unlink()
    with pytest.raises(PolicyError, match=r"is packed, but no quantization_config"):
        check_directory(out, POW2)


def test_codes_outside_the_experts_are_refused(tmp_path: Path, packed: dict[str, Path]) -> None:
    out = tmp_path / "policy"
    shutil.copytree(packed["modelopt"], out)
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(out, name, torch.zeros(64, 32, dtype=torch.uint8))
    with pytest.raises(PolicyError, match="outside the routed experts"):
        check_directory(out, POW2)
