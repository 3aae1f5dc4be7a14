"""Rounding hints of the real engine: complete, of the right tokens, and the same whichever way they were computed."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import engine_model
import numpy as np
import pytest
import torch
from engine_client import decoded, events, flush, generate, wait_for

from trace_serve import nvfp4
from trace_serve.engine.launch import EngineProcess
from trace_serve.hints import wire
from trace_serve.policy.manifest import Policy

pytestmark = pytest.mark.engine


def test_the_report_proves_what_is_loaded(fp4_engine: EngineProcess, fp4_policy: Policy) -> None:
    report = fp4_engine.request("/trace/report")
    assert report["mode"] == "fp4"
    assert report["recipe_id"] == fp4_policy.recipe_id
    assert report["policy_digest"] == fp4_policy.digest
    layers = engine_model.LAYERS
    assert (report["experts"]["format"], report["experts"]["activations"]) == ("nvfp4", "nvfp4")
    assert (report["experts"]["layers_quantized"], report["experts"]["layers_total"]) == (layers, layers)
    assert (report["kv"]["format"], report["kv"]["layers_quantized"]) == ("nvfp4", layers)
    packed = engine_model.HEAD_DIM // 2 + engine_model.HEAD_DIM // 16
    assert report["kv"]["bytes_per_token"] == layers * 2 * engine_model.KV_HEADS * packed
    assert set(report["seams"].values()) == {"ok"}


def test_every_prompt_and_answer_token_but_the_last_has_a_row(fp4_engine: EngineProcess, fp4_policy: Policy) -> None:
    prompt = engine_model.token_ids(1, 9)
    answer = generate(fp4_engine, prompt, new=5)
    hints = decoded(answer)
    assert hints.token_ids.tolist() == [*prompt, *answer["output_ids"][:-1]]
    assert hints.next_token_id == answer["output_ids"][-1]
    assert (hints.recipe_id, hints.model_digest) == (fp4_policy.recipe_id, fp4_policy.digest)
    assert [site.name for site in hints.sites] == ["experts_in", "k", "v"]
    for site in hints.sites:
        assert site.layers == tuple(range(engine_model.LAYERS))
        assert site.present.all()


def test_a_prompt_longer_than_the_prefill_chunk_loses_no_row(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(2, 3 * 64 + 17)
    flush(fp4_engine)
    hints = decoded(generate(fp4_engine, prompt, new=2))
    assert hints.rows == len(prompt) + 1
    assert all(site.present.all() for site in hints.sites)


def test_rows_from_the_prefix_cache_equal_the_rows_of_the_cold_run(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(3, 40)
    flush(fp4_engine)
    cold, warm = generate(fp4_engine, prompt), generate(fp4_engine, prompt)
    assert cold["meta_info"]["cached_tokens"] == 0
    cached = warm["meta_info"]["cached_tokens"]
    assert cached >= len(prompt) - 1
    for a, b in zip(decoded(cold).sites, decoded(warm).sites, strict=True):
        assert b.present.all()
        np.testing.assert_array_equal(a.bits[:cached], b.bits[:cached])
        np.testing.assert_array_equal(a.scales[:cached], b.scales[:cached])


def test_the_first_layers_value_hints_are_those_of_the_weights(fp4_engine: EngineProcess, fp4_policy: Policy) -> None:
    """V of layer 0 depends on its own token alone, so it can be recomputed from the checkpoint without the engine."""
    prompt = engine_model.token_ids(4, 50)
    hints = decoded(generate(fp4_engine, prompt, new=1))
    tensors = engine_model.weights(0)
    x = tensors["model.embed_tokens.weight"][torch.tensor(prompt)].float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + engine_model.RMS_NORM_EPS)
    normed = normed.to(torch.bfloat16) * tensors["model.layers.0.input_layernorm.weight"]
    v = normed @ tensors["model.layers.0.self_attn.v_proj.weight"].T
    expected = nvfp4.quantize(v, fp4_policy.recipe.kv_scales(0)[1], fp4_policy.recipe)
    bits = nvfp4.hint_bits(expected.codes).numpy()
    got = hints.site("v").bits[:, 0]
    wrong = np.unpackbits((bits ^ got).view(np.uint8)).mean()
    # The sums run in another order for another matrix shape, so a few values round the other way; unrelated rows would
    # differ in half of their bits.
    assert wrong < 0.05


def test_a_hint_file_appears_where_the_answer_says(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(5, 12)
    answer = generate(fp4_engine, prompt, hints="file", rid="hint-file-test")
    path = Path(str(fp4_engine.config.hint_dir)) / "hint-file-test.safetensors"
    wait_for(path)
    hints = wire.read(path, expect_token_ids=[*prompt, *answer["output_ids"][:-1]])
    assert all(site.present.all() for site in hints.sites)
    assert answer["meta_info"]["trace_hints"]["uri"] == f"file://{path.resolve()}"
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_routed_experts_come_on_the_same_rows(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(11, 14)
    hints = decoded(generate(fp4_engine, prompt, new=4, return_routed_experts=True))
    routed = hints.routed_experts
    assert routed is not None
    assert routed.shape == (hints.rows, engine_model.LAYERS, 2)
    assert routed.max() < engine_model.EXPERTS
    assert (routed[:, :, 0] != routed[:, :, 1]).all()


def test_a_request_without_hints_gets_none(fp4_engine: EngineProcess) -> None:
    body = {"input_ids": engine_model.token_ids(6, 8), "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert "trace_hints" not in fp4_engine.request("/generate", body)["meta_info"]


def test_a_stream_carries_the_hints_with_its_last_chunk_only(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(7, 10)
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True, "custom_params": {"trace_hints": "inline"}}
    chunks = list(events(fp4_engine, "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}))
    assert len(chunks) > 1
    assert ["trace_hints" in chunk["meta_info"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert decoded(chunks[-1]).rows == len(prompt) + 4


def test_a_chat_answer_carries_inline_hints_in_its_metadata(fp4_engine: EngineProcess) -> None:
    body = {
        "model": fp4_engine.served_name,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": {"trace_hints": "inline"},
    }
    answer = fp4_engine.request("/v1/chat/completions", body)
    hints = wire.from_bytes(base64.b64decode(answer["metadata"]["trace_hints"][0]["data"]))
    assert hints.rows == answer["usage"]["prompt_tokens"] + 3


@pytest.mark.parametrize(
    ("hints", "rid", "named"),
    [("yes", "r1", "trace_hints"), (7, "r2", "trace_hints"), ("file", "../escape", "rid"), ("file", "a/b", "rid")],
)
def test_a_bad_hint_request_is_refused_and_the_next_one_works(
    fp4_engine: EngineProcess, hints: Any, rid: str, named: str
) -> None:
    prompt = engine_model.token_ids(8, 6)
    with pytest.raises(urllib.error.HTTPError) as refused:
        generate(fp4_engine, prompt, hints=hints, rid=rid)
    assert refused.value.code == 400
    assert named in refused.value.read().decode()
    assert decoded(generate(fp4_engine, prompt)).rows == len(prompt) + 5


def test_reloading_weights_there_and_back_gives_the_same_log_probabilities(
    fp4_engine: EngineProcess, fp4_policy: Policy, tmp_path: Path
) -> None:
    other = engine_model.write_engine_model(tmp_path / "other", seed=1)
    prompt = engine_model.token_ids(9, 20)

    def logprobs() -> list[float]:
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = fp4_engine.request("/generate", body)
        return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    def load(path: Path) -> None:
        assert fp4_engine.request("/update_weights_from_disk", {"model_path": str(path)}, timeout_s=120)["success"]

    flush(fp4_engine)
    before = logprobs()
    load(other)
    changed = logprobs()
    load(fp4_policy.path)
    assert logprobs() == before
    assert changed != before
    load(fp4_policy.path)
    assert logprobs() == before
    assert all(site.present.all() for site in decoded(generate(fp4_engine, prompt)).sites)


@pytest.mark.parametrize("path", ["/trace/report", "/trace/heartbeat", "/generate", "/v1/models"])
def test_the_engine_answers_nobody_without_its_key(fp4_engine: EngineProcess, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(fp4_engine.url + path, timeout=10)
    with refused.value as error:
        assert error.code == 401


def test_the_heartbeat_is_fresh_while_idle(fp4_engine: EngineProcess) -> None:
    beat = fp4_engine.request("/trace/heartbeat")
    assert beat["alive"]
    assert beat["age_s"] < 5
