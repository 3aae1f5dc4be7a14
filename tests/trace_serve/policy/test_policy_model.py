"""What a config.json says about the layers that NVFP4 applies to."""

from __future__ import annotations

import pytest
from tiny_model import CONFIG

from trace_serve.errors import PolicyError
from trace_serve.policy import ModelShape, check_recipe_fits
from trace_serve.recipe import Recipe

HYBRID = {
    **{key: value for key, value in CONFIG.items() if key not in ("model_type", "num_local_experts")},
    "num_hidden_layers": 8,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "linear_num_value_heads": 4,
}


def test_all_layers_of_mixtral_have_experts_and_a_kv_cache() -> None:
    shape = ModelShape.from_config(CONFIG)
    assert shape.expert_layers == shape.attention_layers == (0, 1)


def test_a_hybrid_model_keeps_kv_in_every_fourth_layer_or_as_its_interval_says() -> None:
    text = {"model_type": "qwen3_5_moe_text", **HYBRID}
    assert ModelShape.from_config(text).attention_layers == (3, 7)
    assert ModelShape.from_config({**text, "full_attention_interval": 2}).attention_layers == (1, 3, 5, 7)
    assert ModelShape.from_config(text).expert_layers == tuple(range(8))
    assert ModelShape.from_config(text).intermediate == 32


def test_dimensions_are_read_from_the_text_part() -> None:
    whole = {"model_type": "qwen3_5_moe", "hidden_size": 7, "text_config": HYBRID}
    assert ModelShape.from_config(whole).hidden == CONFIG["hidden_size"]
    with pytest.raises(PolicyError, match="vocab_size"):
        ModelShape.from_config({**whole, "text_config": {**HYBRID, "vocab_size": 0}})


def test_dense_layers_of_qwen3_moe_have_no_experts() -> None:
    config = {**HYBRID, "model_type": "qwen3_moe"}
    del config["linear_num_value_heads"]
    assert ModelShape.from_config({**config, "mlp_only_layers": [0, 5]}).expert_layers == (1, 2, 3, 4, 6, 7)
    assert ModelShape.from_config({**config, "decoder_sparse_step": 2}).expert_layers == (1, 3, 5, 7)


def test_a_recipe_cannot_name_layers_that_have_nothing_to_quantize() -> None:
    shape = ModelShape.from_config({"model_type": "qwen3_5_moe_text", **HYBRID, "mlp_only_layers": [2]})
    check_recipe_fits(Recipe(expert_layers=(1, 3), kv_layers=(3,)), shape)
    with pytest.raises(PolicyError, match=r"layer 2 has no KV cache; choose among \[3, 7\]"):
        check_recipe_fits(Recipe(kv_layers=(2, 3)), shape)
    with pytest.raises(PolicyError, match="layer 2 has no routed experts"):
        check_recipe_fits(Recipe(expert_layers=(2,)), shape)
