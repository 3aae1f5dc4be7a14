"""Rows are those of the forward passes that sampled a request's tokens, however the scheduler ran it.

Attention gives a row the same bits in any batch and any chunk, and so does a BF16 product on some machines; on
others it rounds differently for another number of rows. Where passes of the same shape ran, or the same pass wrote the
rows, these tests ask for equal bits everywhere; elsewhere for agreement, and `test_engine_attention` for equal bits
where the machine's products allow them. Rows of another token, or shifted by one, agree in about half of their bits.
"""

from __future__ import annotations

import base64
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_model
import numpy as np
import pytest
import torch
import transformers
from engine_client import (
    agreement,
    assert_rows_equal,
    body,
    decoded,
    events,
    flush,
    generate,
    post,
    together,
    wait_for,
)

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.hints import wire
from trace_serve.hints.options import HintOptions
from trace_serve.mismatch.sites import MeasuredRounding, shares
from trace_serve.nvfp4 import Quantized, dequantize
from trace_serve.policy.manifest import Policy

pytestmark = pytest.mark.engine

ALIGNED = 0.97
"""Bits that agree at least when the same tokens ran in passes of other shapes, on any machine."""


@pytest.fixture(scope="module")
def small_engine(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A KV pool that a few requests fill, no prefix cache, no overlap, odd chunks, whole codes of every site."""
    directory = tmp_path_factory.mktemp("small-engine")
    config = EngineConfig(
        model=fp4_policy.path,
        recipe=fp4_policy.recipe,
        hint_dir=directory / "hints",
        log_path=directory / "engine.log",
        hints=HintOptions(sites=("experts_in", "k", "v", "experts_mid"), codes="full", scale="byte"),
        max_total_tokens=512,
        max_running_requests=16,
        chunked_prefill_size=37,
        extra_args=("--disable-radix-cache", "--disable-overlap-schedule", "--schedule-conservativeness=0.05"),
    )
    with EngineProcess(config) as engine:
        engine.wait_ready(240)
        yield engine


def complete(hints: wire.HintFile, prompt: list[int], answer: dict[str, Any], *, first: int = 0) -> None:
    """One row for every token that was an input, all present, log-probabilities on the sampled ones."""
    output = answer["output_ids"]
    tokens = [*prompt, *output]
    inputs = tokens[:-1] if output else tokens
    assert hints.token_ids.tolist() == inputs[first:]
    assert hints.first_token == first
    assert hints.next_token_id == (output[-1] if output else None)
    assert all(site.present.all() for site in hints.sites)
    assert hints.logprobs is not None
    sampled = np.arange(first, len(inputs)) >= len(prompt) - 1
    np.testing.assert_array_equal(~np.isnan(hints.logprobs), sampled if output else np.zeros_like(sampled))
    assert hints.routed_experts is not None
    assert hints.routed_experts.shape[0] == hints.rows


def test_log_probabilities_are_those_of_the_answer(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(20, 15)
    answer = generate(fp4_engine, prompt, return_logprob=True)
    hints = decoded(answer)
    complete(hints, prompt, answer)
    returned = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert hints.logprobs is not None
    np.testing.assert_array_equal(hints.logprobs[len(prompt) - 1 :], np.float32(returned))


def test_an_answer_shows_log_probabilities_only_to_those_who_asked(fp4_engine: EngineProcess) -> None:
    answer = generate(fp4_engine, engine_model.token_ids(21, 5))
    assert "output_token_logprobs" not in answer["meta_info"]
    assert decoded(generate(fp4_engine, [5, 6], hints={"sink": "inline", "logprobs": False})).logprobs is None


@pytest.mark.parametrize("new", [0, 1])
def test_few_new_tokens_still_give_every_prompt_row(fp4_engine: EngineProcess, new: int) -> None:
    prompt = engine_model.token_ids(22, 70)
    flush(fp4_engine)
    answer = generate(fp4_engine, prompt, new=new)
    complete(decoded(answer), prompt, answer)
    assert len(answer["output_ids"]) == new


def test_requests_with_and_without_hints_share_a_batch(fp4_engine: EngineProcess) -> None:
    prompts = [engine_model.token_ids(100 + i, 5 + 13 * i) for i in range(12)]
    flush(fp4_engine)
    alone = [generate(fp4_engine, prompt, new=12) for prompt in prompts]
    flush(fp4_engine)
    bodies = [body(prompt, new=12, hints="inline" if i % 3 else None) for i, prompt in enumerate(prompts)]
    answers = together(fp4_engine, bodies)
    for i, (prompt, answer, single) in enumerate(zip(prompts, answers, alone, strict=True)):
        if i % 3 == 0:
            assert "trace_hints" not in answer["meta_info"]
            continue
        hints, reference = decoded(answer), decoded(single)
        complete(hints, prompt, answer)
        same = next(
            (k for k, (a, b) in enumerate(zip(hints.token_ids, reference.token_ids, strict=True)) if a != b), hints.rows
        )
        assert agreement(hints, reference, slice(0, same)) > ALIGNED


def test_slots_that_were_evicted_and_used_again_give_the_new_rows(fp4_engine: EngineProcess) -> None:
    """The pool has 4,096 slots; twelve prompts of 500 tokens turn it over."""
    prompts = [engine_model.token_ids(200 + i, 500) for i in range(12)]
    first = [generate(fp4_engine, prompt, new=2) for prompt in prompts[:2]]
    for prompt in prompts[2:]:
        complete(decoded(answer := generate(fp4_engine, prompt, new=2)), prompt, answer)
    again = [generate(fp4_engine, prompt, new=2) for prompt in prompts[:2]]
    for prompt, before, after in zip(prompts, first, again, strict=False):
        assert after["meta_info"]["cached_tokens"] < len(prompt) // 2
        complete(decoded(after), prompt, after)
        assert_rows_equal(decoded(before), decoded(after))


def test_a_later_turn_continues_where_the_earlier_one_ended(fp4_engine: EngineProcess) -> None:
    """The last token of turn 1 has no row in it; the prefill of turn 2 writes it."""
    flush(fp4_engine)
    prompt = engine_model.token_ids(23, 30)
    one = generate(fp4_engine, prompt, new=8)
    so_far = [*prompt, *one["output_ids"]]
    longer = [*so_far, *engine_model.token_ids(24, 9)]
    first = len(so_far) - 1
    two = generate(fp4_engine, longer, new=5, hints={"sink": "inline", "first_token": first})
    hints = decoded(two)
    assert two["meta_info"]["cached_tokens"] >= first
    complete(hints, longer, two, first=first)
    whole = decoded(generate(fp4_engine, longer, new=5))
    assert_rows_equal(decoded(one), whole, slice(0, first))
    flush(fp4_engine)
    cold = decoded(generate(fp4_engine, longer, new=1))
    assert agreement(whole, cold, slice(0, len(longer))) > ALIGNED
    np.testing.assert_array_equal(hints.sites[0].bits[0], whole.sites[0].bits[first])


def test_parallel_samples_have_hints_of_their_own(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(25, 20)
    written = fp4_engine.request("/trace/report")["hint_files"]["written"]
    sampling = {"n": 3, "temperature": 1.0, "new": 6}
    answers: Any = generate(fp4_engine, prompt, hints="file", rid="parallel", **sampling)
    assert [a["meta_info"]["trace_hints"]["name"] for a in answers] == [f"parallel_0-{i}" for i in range(3)]
    assert len({tuple(a["output_ids"]) for a in answers}) == 3
    for i, answer in enumerate(answers):
        path = wait_for(Path(str(fp4_engine.config.hint_dir)) / f"parallel_0-{i}.safetensors")
        complete(wire.read(path), prompt, answer)
    # The request that only fills the prefix cache writes none.
    assert fp4_engine.request("/trace/report")["hint_files"]["written"] == written + 3


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_openai_routes_carry_the_hints_of_every_choice(
    fp4_engine: EngineProcess, route: str, stream: bool, n: int
) -> None:
    request: dict[str, Any] = {
        "model": fp4_engine.served_name,
        "max_tokens": 4,
        "temperature": 1.0,
        "ignore_eos": True,
        "n": n,
        "stream": stream,
        "custom_params": {"trace_hints": "inline"},
    }
    request |= {"messages": [{"role": "user", "content": "hello"}]} if "chat" in route else {"prompt": "hello"}
    if stream:
        chunks = list(events(fp4_engine, route, request | {"stream_options": {"include_usage": True}}))
        carriers = [chunk for chunk in chunks if chunk.get("metadata")]
        assert carriers == chunks[-1:]
        found, usage = carriers[0]["metadata"]["trace_hints"], chunks[-2]["usage"]
    else:
        answer = fp4_engine.request(route, request)
        found, usage = answer["metadata"]["trace_hints"], answer["usage"]
    files = [wire.from_bytes(base64.b64decode(one["data"])) for one in found]
    assert [f.rows for f in files] == [usage["prompt_tokens"] + 3] * n
    assert all(site.present.all() for f in files for site in f.sites)


def test_layers_sites_and_scales_are_chosen_by_the_request(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(26, 11)
    everything = decoded(generate(fp4_engine, prompt, hints={"scale": "byte"}))
    half = decoded(generate(fp4_engine, prompt, hints={"layers": "deeper-half", "scale": "none"}))
    assert {site.layers for site in half.sites} == {(2, 3)}
    assert {site.scale_kind for site in half.sites} == {"none"}
    listed = decoded(generate(fp4_engine, prompt, hints={"layers": [1, 3], "sites": ["k", "experts_in"]}))
    assert [site.name for site in listed.sites] == ["experts_in", "k"]
    for site in listed.sites:
        whole = everything.site(site.name)
        np.testing.assert_array_equal(site.bits[: len(prompt)], whole.bits[: len(prompt), [1, 3]])
        assert site.scales is not None
        assert whole.scales is not None
        np.testing.assert_array_equal(site.scales[: len(prompt)], whole.scales[: len(prompt), [1, 3]] & 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sink": "ftp"}, "trace_hints.sink"),
        ({"sink": "s3://bucket/x"}, "trace_hints.sink"),
        ({"sink": "file:///etc"}, "trace_hints.sink"),
        ({"sink": "shm"}, "trace_hints.sink"),
        ({"sites": ["q"]}, "trace_hints.sites"),
        ({"sites": []}, "trace_hints.sites"),
        ({"sites": ["experts_mid"]}, "trace_hints.sites"),
        ({"codes": "full"}, "trace_hints.codes"),
        ({"codes": "all"}, "trace_hints.codes"),
        ({"layers": [4]}, "trace_hints.layers"),
        ({"layers": "half"}, "trace_hints.layers"),
        ({"layers": [1, 1]}, "trace_hints.layers"),
        ({"scale": "bit"}, "trace_hints.scale"),
        ({"first_token": 7}, "trace_hints.first_token"),
        ({"first_token": -1}, "trace_hints.first_token"),
        ({"first_token": True}, "trace_hints.first_token"),
        ({"logprobs": 1}, "trace_hints.logprobs"),
        ({"versions": "new"}, "trace_hints.versions"),
        ({"depth": 3}, "depth"),
        ([], "trace_hints"),
    ],
)
def test_a_bad_option_is_refused_by_name_and_the_next_request_works(
    fp4_engine: EngineProcess, options: Any, named: str
) -> None:
    prompt = engine_model.token_ids(27, 6)
    with pytest.raises(urllib.error.HTTPError) as refused:
        generate(fp4_engine, prompt, hints=options)
    assert refused.value.code == 400
    assert named in refused.value.read().decode()
    assert decoded(generate(fp4_engine, prompt)).rows == len(prompt) + 5


def test_beam_search_has_no_hints(fp4_engine: EngineProcess) -> None:
    request = body(engine_model.token_ids(32, 6))
    request["sampling_params"]["beam_width"] = 2
    with pytest.raises(urllib.error.HTTPError) as refused:
        fp4_engine.request("/generate", request)
    assert refused.value.code == 400
    assert "beam_width" in refused.value.read().decode()


def test_a_request_that_is_aborted_keeps_the_rows_that_ran(fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(28, 12)
    answers: list[dict[str, Any]] = []
    request = body(prompt, new=1500, hints="inline", rid="to-be-aborted", stream=True)
    reader = threading.Thread(target=lambda: answers.extend(events(fp4_engine, "/generate", request)))
    reader.start()
    while len(answers) < 5:
        time.sleep(0.01)
    post(fp4_engine, "/abort_request", {"rid": "to-be-aborted"})
    reader.join(30)
    assert not reader.is_alive()
    last = answers[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    complete(decoded(last), prompt, last)


def test_a_retracted_request_keeps_the_rows_that_sampled_its_tokens(fp4_engine: EngineProcess) -> None:
    """Retracted while decoding: what was sampled before keeps its rows and log-probabilities, bit for bit."""
    prompt = engine_model.token_ids(29, 25)
    flush(fp4_engine)
    undisturbed = decoded(generate(fp4_engine, prompt, new=150, return_logprob=True))
    flush(fp4_engine)
    answers: list[dict[str, Any]] = []
    request = body(prompt, new=150, stream=True, return_logprob=True)
    reader = threading.Thread(target=lambda: answers.extend(events(fp4_engine, "/generate", request)))
    reader.start()
    while len(answers) < 8:
        time.sleep(0.005)
    post(fp4_engine, "/pause_generation", {"mode": "retract"})
    seen = len(answers[-1]["output_ids"])
    flush(fp4_engine)
    post(fp4_engine, "/continue_generation", {})
    reader.join(60)
    last = answers[-1]
    assert last["meta_info"]["num_retractions"] == 1
    hints = decoded(last)
    complete(hints, prompt, last)
    kept = slice(0, len(prompt) + seen - 1)
    assert_rows_equal(hints, undisturbed, kept)
    assert hints.logprobs is not None
    assert undisturbed.logprobs is not None
    np.testing.assert_array_equal(hints.logprobs[kept], undisturbed.logprobs[kept])


def test_many_requests_in_a_pool_that_is_too_small_are_retracted_and_complete(small_engine: EngineProcess) -> None:
    prompts = [engine_model.token_ids(300 + i, 20 + i) for i in range(12)]
    alone = [generate(small_engine, prompt, new=70, ignore_eos=False) for prompt in prompts]
    # The scheduler plans exactly for requests that ignore the end token, and guesses for others.
    answers = together(small_engine, [body(prompt, new=70, ignore_eos=False) for prompt in prompts])
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    for prompt, answer, single in zip(prompts, answers, alone, strict=True):
        hints, reference = decoded(answer), decoded(single)
        assert [site.name for site in hints.sites] == ["experts_in", "experts_mid", "k", "v"]
        complete(hints, prompt, answer)
        same = next(
            (k for k, (a, b) in enumerate(zip(hints.token_ids, reference.token_ids, strict=True)) if a != b), hints.rows
        )
        assert agreement(hints, reference, slice(0, same)) > ALIGNED


def test_odd_chunks_without_prefix_cache_lose_no_row(small_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(30, 37 * 3 + 5)
    answer = generate(small_engine, prompt, new=3)
    complete(decoded(answer), prompt, answer)
    assert answer["meta_info"]["cached_tokens"] == 0


def test_the_middle_rows_belong_to_the_routed_experts(small_engine: EngineProcess) -> None:
    """A token's two experts have a global scale each, and swapping them would pair hints with the wrong expert."""
    prompt = engine_model.token_ids(31, 9)
    hints = decoded(generate(small_engine, prompt, new=1))
    site = hints.site("experts_mid")
    assert site.groups == 2
    assert site.values == 2 * engine_model.INTERMEDIATE
    assert site.global_log2 is not None
    assert site.global_log2.shape == (len(prompt), engine_model.LAYERS, 2)
    assert site.scale_kind == "byte"
    halves = site.bits.reshape(len(prompt), engine_model.LAYERS, 2, -1)
    assert (halves[:, :, 0] != halves[:, :, 1]).any(axis=-1).all()


def test_whole_codes_end_in_the_ordinary_bits(small_engine: EngineProcess, fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(33, 40)
    whole = decoded(generate(small_engine, prompt, new=12))
    ordinary = decoded(generate(small_engine, prompt, new=12, hints={"codes": "lsb"}))
    assert all(site.codes is None for site in ordinary.sites)
    assert_rows_equal(whole, ordinary)
    # K and V have their codes in the pool of any engine.
    of_pool = decoded(generate(fp4_engine, prompt, new=1, hints={"codes": "full", "sites": ["k", "v"]}))
    for site in (*whole.sites, *of_pool.sites):
        assert site.codes is not None
        nibbles = np.stack((site.codes & 0xF, site.codes >> 4), axis=-1).reshape(*site.bits.shape, 16)
        assert len(np.unique(nibbles)) == 16
        np.testing.assert_array_equal((site.bits[..., None] >> np.arange(16)) & 1, nibbles & 1)


def test_a_replay_keeps_the_codes_of_the_rollout(
    small_engine: EngineProcess, fp4_policy: Policy, request: pytest.FixtureRequest
) -> None:
    """The trainer's own codes of every operand are nearly those that are replayed, so they are the right rows of it."""
    recipe = fp4_policy.recipe
    rollout = decoded(generate(small_engine, engine_model.token_ids(34, 40), new=12))
    directory = request.getfixturevalue("engine_model")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    replay = HintedRounding(recipe, [rollout], mode="replay")
    measured = MeasuredRounding(replay, HintedRounding(recipe, [rollout], mode="replay"), recipe)
    fake_quantize(model, recipe, measured)
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).unsqueeze(0)
    with RoutingReplay(model, [rollout]), torch.inference_mode():
        model(ids)
    found = shares([measured])
    assert sorted(found) == ["experts_in", "experts_mid", "k", "v"]
    differing = {name: site.total.codes for name, site in found.items()}
    assert all(share is not None and share < 0.1 for share in differing.values()), differing
    site = rollout.site("k")
    assert site.codes is not None
    assert site.scales is not None
    scale = torch.tensor(recipe.kv_scales(1)[0])
    stored = Quantized(torch.tensor(site.codes[:, 1]), torch.tensor(site.scales[:, 1]), scale)
    heads = engine_model.KV_HEADS
    x = torch.zeros(1, heads, rollout.rows, engine_model.HEAD_DIM, dtype=torch.bfloat16)
    expected = dequantize(stored, x.dtype).reshape(1, rollout.rows, heads, -1).transpose(1, 2)
    assert torch.equal(replay.keys(1, x, 0), expected)


def test_the_report_names_what_is_kept(small_engine: EngineProcess, fp4_engine: EngineProcess) -> None:
    kept = small_engine.request("/trace/report")["hints"]
    assert kept["sites"] == ["experts_in", "experts_mid", "k", "v"]
    assert (kept["layers"], kept["codes"], kept["scale"]) == ([0, 1, 2, 3], "full", "byte")
    assert fp4_engine.request("/trace/report")["hints"]["sites"] == ["experts_in", "k", "v"]
