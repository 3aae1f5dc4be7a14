"""The engine computes the recipe it was given, not the default one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import engine_model
import numpy as np
import pytest
import torch

from trace_serve import nvfp4
from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.hints import wire
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.engine

RECIPE = Recipe(
    experts="w4a4",
    expert_layers=(1, 2),
    expert_rotation=16,
    kv_layers=(0, 3),
    k_rotation=16,
    kv_global_scale="static",
    k_global_scale=(0.5,),
    v_global_scale=(0.25, 1.0, 1.0, 0.125),
    kv_scale_formula="amax_over_six",
    zero_block="min_subnormal",
    four_over_six="experts",
    global_scale_max=256.0,
)


@pytest.fixture(scope="module")
def engine(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("recipes") / "engine.log"
    # No chunked prefill: a prompt is one pass, however long.
    config = EngineConfig(
        model=engine_model,
        recipe=RECIPE,
        log_path=log,
        max_total_tokens=2048,
        chunked_prefill_size=-1,
        # Without chunks SGLang reserves a card's memory for the longest pass, and finds that a CPU has none.
        extra_args=("--mem-fraction-static=0.5",),
    )
    with EngineProcess(config) as process:
        process.wait_ready(240)
        yield process


def rollout(engine: EngineProcess, prompt: list[int]) -> wire.HintFile:
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True, "custom_params": {"trace_hints": "inline"}}
    answer = engine.request("/generate", {"input_ids": prompt, "sampling_params": sampling})
    return wire.from_bytes(
        base64.b64decode(answer["meta_info"]["trace_hints"]["data"]), expect_recipe_id=RECIPE.recipe_id
    )


def test_the_layers_of_the_recipe_are_quantized_and_no_others(engine: EngineProcess) -> None:
    report = engine.request("/trace/report")
    assert report["experts"]["layers_quantized"] == 2
    assert report["kv"]["layers_quantized"] == 2
    packed = engine_model.HEAD_DIM // 2 + engine_model.HEAD_DIM // 16
    per_head = 2 * packed + 2 * 2 * engine_model.HEAD_DIM
    assert report["kv"]["bytes_per_token"] == 2 * engine_model.KV_HEADS * per_head
    hints = rollout(engine, engine_model.token_ids(1, 20))
    assert hints.site("experts_in").layers == (1, 2)
    assert hints.site("k").layers == hints.site("v").layers == (0, 3)


def test_values_are_rounded_under_the_recipes_own_scales(engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(2, 60)
    hints = rollout(engine, prompt)
    tensors = engine_model.weights(0)
    x = tensors["model.embed_tokens.weight"][torch.tensor(prompt)].float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + engine_model.RMS_NORM_EPS)
    normed = normed.to(torch.bfloat16) * tensors["model.layers.0.input_layernorm.weight"]
    v = normed @ tensors["model.layers.0.self_attn.v_proj.weight"].T

    def differing(recipe: Recipe, g: float) -> float:
        bits = nvfp4.hint_bits(nvfp4.quantize(v, g, recipe, operand="kv").codes).numpy()
        got = hints.site("v").bits[: len(prompt), 0]
        return float(np.unpackbits((bits ^ got).view(np.uint8)).mean())

    assert differing(RECIPE, 0.25) < 0.05
    # An E4M3 scale rounds differently under another global scale only where it is subnormal, so a wrong scale is not
    # seen in bits of ordinary values; scaling far enough down shows it.
    assert differing(RECIPE, 2.0**12) > 0.2


def test_a_prompt_of_one_pass_has_all_rows_and_routes(engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(4, 1900)
    hints = rollout(engine, prompt)
    assert hints.token_ids[: len(prompt)].tolist() == prompt
    assert all(site.present.all() for site in hints.sites)
    assert hints.routed_present is None or hints.routed_present.all()
    assert hints.routed_experts is not None
    assert (hints.routed_experts[:, :, 0] != hints.routed_experts[:, :, 1]).all()


def test_another_recipe_gives_other_log_probabilities(engine: EngineProcess, fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(3, 30)

    def logprobs(process: EngineProcess) -> list[float]:
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return [entry[0] for entry in process.request("/generate", body)["meta_info"]["output_token_logprobs"]]

    assert logprobs(engine) != logprobs(fp4_engine)
