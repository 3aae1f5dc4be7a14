"""BF16 weights rounded at load, ModelOpt's layout and compressed-tensors' give the same engine, bit for bit."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_model
import engine_models_hf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import EngineError, PolicyError
from trace_serve.hints import wire
from trace_serve.policy import Policy, build_policy
from trace_serve.recipe import PRESETS, Recipe

pytestmark = pytest.mark.engine

START_TIMEOUT_S = 400.0

FORMATS = ("bf16", "modelopt", "compressed-tensors")
FOUR_OVER_SIX = Recipe(four_over_six="weights", global_scale_max=256.0)
PROMPTS = (engine_model.token_ids(11, 40), engine_model.token_ids(12, 9))
DAMAGED = "model.layers.2.block_sparse_moe.experts.1.w2.weight_scale"


@dataclass(frozen=True)
class Rollout:
    """What one greedy request gave: token ids, log-probabilities, and the hints' arrays as bytes."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    hints: tuple[bytes, ...]


def rollouts(engine: EngineProcess) -> list[Rollout]:
    out = []
    for prompt in PROMPTS:
        sampling = {
            "temperature": 0,
            "max_new_tokens": 8,
            "ignore_eos": True,
            "custom_params": {"trace_hints": "inline"},
        }
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        meta = engine.request("/generate", body, timeout_s=120)["meta_info"]
        payload = base64.b64decode(meta["trace_hints"]["data"])
        hints = wire.from_bytes(payload, expect_recipe_id=engine.recipe.recipe_id)
        arrays = [array for site in hints.sites for array in (site.bits, site.scales, site.present)]
        entries = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        out.append(
            Rollout(
                tuple(entry[1] for entry in meta["output_token_logprobs"]),
                tuple(entry[0] for entry in entries),
                tuple(np.ascontiguousarray(array).tobytes() for array in arrays),
            )
        )
    return out


@contextmanager
def running(policy: Path, recipe: Recipe, log: Path) -> Iterator[EngineProcess]:
    config = EngineConfig(model=policy, recipe=recipe, log_path=log, max_total_tokens=2048, chunked_prefill_size=64)
    with EngineProcess(config) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        yield engine


def refit(engine: EngineProcess, directory: Path) -> dict[str, Any]:
    return engine.request("/update_weights_from_disk", {"model_path": str(directory)}, timeout_s=120)


@pytest.fixture(scope="module")
def policies(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        weights: build_policy(
            engine_model, root / weights, name="tiny", version="1", recipe=FOUR_OVER_SIX, weights=weights
        )
        for weights in FORMATS
    }


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    """The same formats of another model, to be refitted to."""
    root = tmp_path_factory.mktemp("other-checkpoints")
    source = engine_model.write_engine_model(root / "model", seed=5)
    return {
        weights: build_policy(source, root / weights, name="tiny", version="2", recipe=FOUR_OVER_SIX, weights=weights)
        for weights in FORMATS
    }


def with_a_nan_scale(policy: Policy, out: Path) -> Path:
    """A copy whose one block scale is NaN: headers are sound, data is not."""
    shutil.copytree(policy.path, out)
    tensors = load_file(out / "model.safetensors")
    tensors[DAMAGED].view(torch.uint8)[1, 2] = 0x7F
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def results(
    policies: dict[str, Policy], others: dict[str, Policy], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """One engine a format, one after the other: what it rolls out, after a damaged refit, and after a sound one."""
    root = tmp_path_factory.mktemp("engines")
    out: dict[str, dict[str, Any]] = {}
    for weights in FORMATS:
        damaged = with_a_nan_scale(policies["modelopt"], root / f"damaged-{weights}")
        cut = root / f"cut-{weights}"
        shutil.copytree(others["compressed-tensors"].path, cut)
        shard = cut / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-64])
        with running(policies[weights].path, FOUR_OVER_SIX, root / f"{weights}.log") as engine:
            found: dict[str, Any] = {"report": engine.request("/trace/report"), "first": rollouts(engine)}
            if weights == "compressed-tensors":
                refused = []
                for directory in (damaged, cut):
                    try:
                        refused.append(refit(engine, directory))
                    except OSError as exc:
                        refused.append({"success": False, "message": exc.read().decode()})  # type: ignore[attr-defined]
                found |= {"refused": refused, "after_refusal": rollouts(engine)}
            refits = FORMATS if weights == "modelopt" else (weights,)
            found["refitted"] = {}
            for target in refits:
                found["answer"] = refit(engine, others[target].path)
                found["refitted"][target] = rollouts(engine)
            found["answer_back"] = refit(engine, policies[weights].path)
            found["back"] = rollouts(engine)
            out[weights] = found
    return out


@pytest.mark.parametrize("weights", FORMATS[1:])
def test_a_packed_checkpoint_gives_the_rollouts_of_the_bf16_one(
    results: dict[str, dict[str, Any]], weights: str
) -> None:
    assert results["bf16"]["first"][0].tokens != results["bf16"]["first"][1].tokens
    assert results[weights]["first"] == results["bf16"]["first"]


def test_every_format_runs_the_nvfp4_method_in_every_layer(results: dict[str, dict[str, Any]]) -> None:
    for weights, found in results.items():
        assert found["report"]["experts"]["checkpoint"] == weights
        assert found["report"]["experts"]["format"] == "nvfp4"
        assert found["report"]["experts"]["layers_quantized"] == engine_model.LAYERS
        assert found["report"]["recipe_id"] == FOUR_OVER_SIX.recipe_id


def test_refits_from_disk_take_every_format_to_the_same_weights(results: dict[str, dict[str, Any]]) -> None:
    expected = results["bf16"]["refitted"]["bf16"]
    assert expected != results["bf16"]["first"]
    assert results["modelopt"]["refitted"] == dict.fromkeys(FORMATS, expected)
    assert results["compressed-tensors"]["refitted"] == {"compressed-tensors": expected}
    assert all(found["answer"]["success"] for found in results.values())


def test_going_back_gives_the_first_weights_again(results: dict[str, dict[str, Any]]) -> None:
    for found in results.values():
        assert found["back"] == found["first"]


def test_a_damaged_refit_names_what_is_damaged_and_the_old_weights_serve(results: dict[str, dict[str, Any]]) -> None:
    found = results["compressed-tensors"]
    nan, cut = found["refused"]
    assert not nan["success"]
    assert DAMAGED in nan["message"]
    assert not cut["success"]
    assert "model.safetensors" in cut["message"]
    assert found["after_refusal"] == found["first"]


def test_damaged_scales_stop_the_start_and_are_named(policies: dict[str, Policy], tmp_path: Path) -> None:
    damaged = with_a_nan_scale(policies["modelopt"], tmp_path / "damaged")
    engine = EngineProcess(EngineConfig(model=damaged, recipe=FOUR_OVER_SIX, log_path=tmp_path / "log"))
    engine.start()
    with pytest.raises(EngineError, match=DAMAGED.replace(".", r"\.")):
        engine.wait_ready(START_TIMEOUT_S)
    assert engine.poll() is not None


def test_a_cut_shard_and_a_contradicting_recipe_stop_before_the_process_starts(
    policies: dict[str, Policy], tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(policies["modelopt"].path, cut)
    shard = cut / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    for directory, recipe, message in (
        (cut, FOUR_OVER_SIX, r"model\.safetensors"),
        (policies["modelopt"].path, PRESETS["bf16"], "experts are packed NVFP4"),
        (policies["compressed-tensors"].path, Recipe(expert_rotation=16), "not rotated"),
    ):
        engine = EngineProcess(EngineConfig(model=directory, recipe=recipe, log_path=tmp_path / "log"))
        with pytest.raises(PolicyError, match=message):
            engine.start()
        assert engine.pid is None


def test_a_modelopt_checkpoint_equals_the_default_policy(
    engine_model: Path, fp4_engine: EngineProcess, tmp_path: Path
) -> None:
    policy = build_policy(engine_model, tmp_path / "p", name="tiny", version="1", recipe=Recipe(), weights="modelopt")
    with running(policy.path, policy.recipe, tmp_path / "log") as engine:
        assert rollouts(engine) == rollouts(fp4_engine)


def test_names_of_qwen3_moe_are_read_and_round_to_its_bf16_weights(tmp_path: Path) -> None:
    source = engine_models_hf.write_model("qwen3_moe", tmp_path / "model")
    plain, packed = (
        build_policy(source, tmp_path / weights, name="q", version="1", recipe=FOUR_OVER_SIX, weights=weights)
        for weights in ("bf16", "compressed-tensors")
    )
    with running(packed.path, FOUR_OVER_SIX, tmp_path / "log") as engine:
        first = rollouts(engine)
        assert refit(engine, plain.path)["success"]
        assert rollouts(engine) == first
