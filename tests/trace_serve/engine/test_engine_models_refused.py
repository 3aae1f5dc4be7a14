"""A model that the engine cannot serve rightly is refused from its config.json, by name and with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trace_serve.engine.architectures import Architecture
from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import ConfigError, RecipeError
from trace_serve.policy.dims import QWEN35_35B_A3B
from trace_serve.recipe import PRESETS, Recipe

MOE = {"num_hidden_layers": 4, "num_experts": 8, "max_position_embeddings": 4096}
DEEPSEEK = {**MOE, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "kv_lora_rank": 512}
GPT_OSS = {**MOE, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8}
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
MIXTRAL = {**MOE, "architectures": ["MixtralForCausalLM"], "sliding_window": None}
HYBRID = {**QWEN35_35B_A3B, "architectures": ["Qwen3_5MoeForCausalLM"]}


def check(config: Mapping[str, Any], recipe: Recipe, *, device: str = "cpu", context_length: int | None = None) -> None:
    Architecture(config).check(recipe, device=device, context_length=context_length)


@pytest.mark.parametrize("recipe", [Recipe(), PRESETS["bf16"]])
@pytest.mark.parametrize(
    ("config", "reason"),
    [(DEEPSEEK, r"DeepseekV3ForCausalLM: .*latent attention"), (GPT_OSS, r"GptOssForCausalLM: .*attention sinks")],
)
def test_attention_that_the_cpu_engine_lacks_is_refused_under_every_recipe(
    config: dict[str, Any], reason: str, recipe: Recipe
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check(config, recipe)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


def test_on_a_card_sglang_itself_serves_them_in_bf16() -> None:
    check(DEEPSEEK, PRESETS["bf16"], device="cuda")
    with pytest.raises(ConfigError, match="device: got cuda"):
        check(DEEPSEEK, Recipe(), device="cuda")


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(experts="w4a16", kv="bf16")])
def test_a_recipe_for_experts_is_refused_where_there_are_none(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="LlamaForCausalLM has none; choose experts='bf16'") as caught:
        check(LLAMA, recipe)
    assert caught.value.field == "experts"
    check(LLAMA, Recipe(experts="bf16"))


def test_an_architecture_that_nobody_listed_is_tried() -> None:
    check({**MOE, "architectures": ["SomethingNewForCausalLM"]}, Recipe())


def test_a_refused_model_starts_no_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    engine = EngineProcess(EngineConfig(model=tmp_path, recipe=Recipe()))
    with pytest.raises(ConfigError, match="latent attention"):
        engine.start()
    assert engine.pid is None


def test_a_sliding_window_that_sglang_ignores_limits_the_context() -> None:
    windowed = {**MIXTRAL, "sliding_window": 1024}
    with pytest.raises(ConfigError, match=r"sliding_window is 1024 .* context_length=1024"):
        check(windowed, Recipe())
    check(windowed, Recipe(), context_length=1024)
    check(MIXTRAL, Recipe())
    unused = {**windowed, "architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": False}
    check(unused, Recipe())
    with pytest.raises(ConfigError, match="sliding_window"):
        check({**unused, "use_sliding_window": True}, Recipe())


def test_olmoe_with_clipping_is_refused() -> None:
    olmoe = {**MOE, "architectures": ["OlmoeForCausalLM"], "clip_qkv": None}
    check(olmoe, Recipe())
    with pytest.raises(ConfigError, match=r"clip_qkv is 8\.0"):
        check({**olmoe, "clip_qkv": 8.0}, Recipe())


def test_olmoe_on_several_ranks_is_refused() -> None:
    olmoe = Architecture({**MOE, "architectures": ["OlmoeForCausalLM"]})
    with pytest.raises(ConfigError, match=r"each of 2 ranks' heads alone; start with tensor_parallel=1"):
        olmoe.check(PRESETS["bf16"], device="cpu", ranks=2)
    olmoe.check(PRESETS["bf16"], device="cpu", ranks=1)


def test_layer_types_that_sglang_would_build_otherwise_are_refused() -> None:
    types = ["linear_attention", "full_attention"] * 20
    with pytest.raises(ConfigError, match=r"20 full-attention layers, .* \(4, default 4\), which gives 10"):
        check({**HYBRID, "layer_types": types}, Recipe())
    check({**HYBRID, "layer_types": types, "full_attention_interval": 2}, Recipe())


def test_a_hybrid_model_has_kv_in_its_full_attention_layers_only() -> None:
    architecture = Architecture(HYBRID)
    assert architecture.is_hybrid
    assert architecture.kv_layers == tuple(range(3, 40, 4))
    check(HYBRID, Recipe(kv_layers=(3, 39)))
    with pytest.raises(RecipeError, match=r"layers \[4\] of Qwen3_5MoeForCausalLM keep no K and V"):
        check(HYBRID, Recipe(kv_layers=(3, 4)))
    nested = Architecture({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": HYBRID})
    assert nested.kv_layers == architecture.kv_layers
    assert nested.experts == 256


def test_an_expert_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RecipeError, match="layer 4 does not exist, MixtralForCausalLM has 4"):
        check(MIXTRAL, Recipe(expert_layers=(0, 4)))


def test_recurrent_state_is_kept_between_passes_on_a_cpu_and_by_sglangs_own_choice_on_a_card() -> None:
    assert Architecture(HYBRID).arguments(device="cpu") == (
        "--mamba-radix-cache-strategy=no_buffer",
        "--disable-overlap-schedule",
    )
    assert Architecture(HYBRID).arguments(device="cuda") == ()
    assert Architecture(MIXTRAL).arguments(device="cpu") == ()
