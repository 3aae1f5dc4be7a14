"""Two tensor-parallel ranks: the same grid as one rank, rows put together, counters that add up."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_model
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_client import agreement, assert_rows_equal, body, decoded, flush, generate, together, wait_for

from trace_serve import nvfp4
from trace_serve.engine.command import _cores_of_ranks
from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.engine.ranks import Ranks, assemble, slice_of_weight, slices_of_rows
from trace_serve.engine.rows import Rows
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import ConfigError, EngineError
from trace_serve.hints import wire
from trace_serve.hints.options import HintOptions
from trace_serve.hints.rows import Site
from trace_serve.kernels import kernels_for
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import Recipe

RECIPES = [
    Recipe(),
    Recipe(expert_rotation=16, gate_up_scale="split"),
    Recipe(four_over_six="experts", global_scale_max=256.0),
    Recipe(
        activation_global_scale="per_tensor_static", experts_in_global_scale=(0.25,), experts_mid_global_scale=(0.5,)
    ),
]
ROWS, WIDTH, OUT = 5, 96, 64


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The second product's input, w2 and w13, with a maximum in each half and an all-zero half row."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    rows[0, 3], rows[1, WIDTH - 1], rows[2, : WIDTH // 2] = 500.0, -3000.0, 0.0
    down = torch.randn(OUT, WIDTH, generator=generator) * 0.05
    down[:, : WIDTH // 2] *= 0.01
    gate_up = torch.randn(2 * WIDTH, OUT, generator=generator) * 0.05
    gate_up[WIDTH + 3, 5] = 9.0
    return rows.bfloat16(), down.bfloat16(), gate_up.bfloat16()


def halves(gate_up: torch.Tensor, rank: int) -> torch.Tensor:
    """Gate and up rows of one of two ranks."""
    return torch.cat([part.chunk(2)[rank] for part in gate_up.chunk(2)]).contiguous()


def _rank(rank: int, port: int, results: Any) -> None:
    """One of two processes; sends back its slices, its gathered rows, and what a difference between ranks raises."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, dist.group.WORLD)
    rows, down, gate_up = matrices()
    found: list[Any] = []
    for recipe in RECIPES:
        counters = nvfp4.new_counters()
        static = recipe.experts_mid_scale(0)
        values, kept = slices_of_rows(ranks, recipe, rows.chunk(2, dim=1)[rank].contiguous(), static, True, counters)
        w2 = slice_of_weight(ranks, recipe, down.chunk(2, dim=1)[rank].contiguous(), 1, counters)
        w13 = slice_of_weight(ranks, recipe, halves(gate_up, rank), 2, counters)
        assert kept.hints is not None
        found.append([t.float().numpy() for t in (values, w2, w13, kept.global_scale, kept.hints.view(torch.int16))])
    gathered = ranks.gather(part_of(rank), WIDTHS)
    failed = ranks.gather("no slots" if rank else part_of(0), WIDTHS)
    try:
        ranks.require_same([True, rank == 0], "a test")
        error = ""
    except EngineError as exc:
        error = str(exc)
    results.put((rank, found, gathered, failed, error))
    dist.destroy_process_group()


TOKENS, LAYERS, HEADS, BLOCKS, EXPERTS, SLICE = 3, 2, 4, 2, 2, 8
WIDTHS = {"k": HEADS * BLOCKS, "v": HEADS * BLOCKS, "experts_mid": 2 * SLICE}


def whole() -> Rows:
    generator = np.random.default_rng(0)

    def site(name: str, width: int, groups: int | None) -> Site:
        return Site(
            name=name,
            layers=tuple(range(LAYERS)),
            bits=generator.integers(1 << 16, size=(TOKENS, LAYERS, width)).astype(np.uint16),
            scales=generator.integers(1 << 8, size=(TOKENS, LAYERS, width)).astype(np.uint8),
            codes=generator.integers(1 << 8, size=(TOKENS, LAYERS, 8 * width)).astype(np.uint8),
            present=np.array([True, True, False]),
            global_log2=None if groups is None else np.ones((TOKENS, LAYERS, groups), dtype=np.int8),
            groups=groups or 1,
        )

    sites = (
        site("experts_in", 4, 1),
        site("experts_mid", EXPERTS * SLICE * 2, EXPERTS),
        site("k", HEADS * BLOCKS, None),
        site("v", HEADS * BLOCKS, None),
    )
    return Rows(sites, np.array([0, 0, 1], dtype=np.int32), np.zeros((TOKENS, LAYERS, 2), dtype=np.int32))


def part_of(rank: int, ranks: int = 2) -> Rows:
    """What one rank reads of `whole`."""
    full = whole()
    sites = []
    for site in full.sites:
        if site.name == "experts_in":
            sites.append(site)
            continue
        groups = site.groups if site.name == "experts_mid" else 1

        def cut(array: Any, groups: int = groups) -> Any:
            split = array.reshape(TOKENS, LAYERS, groups, ranks, -1)[:, :, :, rank]
            return np.ascontiguousarray(split.reshape(TOKENS, LAYERS, -1))

        assert site.scales is not None
        assert site.codes is not None
        sites.append(replace(site, bits=cut(site.bits), scales=cut(site.scales), codes=cut(site.codes)))
    return replace(full, sites=tuple(sites))


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    """Results of two real processes in one gloo group, by rank."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found: list[Any] = []
    while len(found) < len(processes):
        assert all(process.is_alive() or process.exitcode == 0 for process in processes)
        with contextlib.suppress(queue.Empty):
            found.append(results.get(timeout=2))
    found.sort(key=lambda one: one[0])
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return found


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_slices_are_rounded_on_the_grid_of_the_whole(two_ranks: list[Any], number: int) -> None:
    recipe = RECIPES[number]
    kernels = kernels_for(recipe)
    rows, down, gate_up = matrices()
    static = recipe.experts_mid_scale(0)
    values, kept = kernels.fake_quantize_activations(rows, static_scale=static, hints=True)
    w2 = kernels.fake_quantize_weight(down)
    w13 = kernels.fake_quantize_weight(gate_up, parts=2)
    slices = [one[1][number] for one in two_ranks]
    np.testing.assert_array_equal(np.concatenate([s[0] for s in slices], axis=1), values.float().numpy())
    np.testing.assert_array_equal(np.concatenate([s[1] for s in slices], axis=1), w2.float().numpy())
    for rank, one in enumerate(slices):
        np.testing.assert_array_equal(one[2], halves(w13, rank).float().numpy())
        np.testing.assert_array_equal(one[3], kept.global_scale.numpy())
    assert kept.hints is not None
    expected = kept.hints.view(torch.int16).float().numpy()
    np.testing.assert_array_equal(np.concatenate([s[4] for s in slices], axis=1), expected)


def assert_same_rows(got: Rows, expected: Rows) -> None:
    assert [site.name for site in got.sites] == [site.name for site in expected.sites]
    for a, b in zip(got.sites, expected.sites, strict=True):
        np.testing.assert_array_equal(a.bits, b.bits, err_msg=a.name)
        assert a.scales is not None
        assert b.scales is not None
        np.testing.assert_array_equal(a.scales, b.scales, err_msg=a.name)
        assert a.codes is not None
        assert b.codes is not None
        np.testing.assert_array_equal(a.codes, b.codes, err_msg=a.name)
        np.testing.assert_array_equal(a.present, b.present, err_msg=a.name)


def test_rank_0_gets_the_whole_rows_and_the_others_none(two_ranks: list[Any]) -> None:
    assert_same_rows(two_ranks[0][2], whole())
    assert two_ranks[1][2] is None


def test_a_rank_that_cannot_read_is_named_and_keeps_nobody_waiting(two_ranks: list[Any]) -> None:
    assert two_ranks[0][3] == "rank 1: no slots"
    assert two_ranks[1][3] is None


def test_ranks_that_loaded_differently_all_say_so(two_ranks: list[Any]) -> None:
    assert [one[4] for one in two_ranks] == ["ranks differ in a test; send the same update to every rank"] * 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_is_put_together(ranks: int) -> None:
    assert_same_rows(assemble([part_of(rank, ranks) for rank in range(ranks)], WIDTHS), whole())


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_that_made_ranks_equal_is_left_out(ranks: int) -> None:
    """As if one head and half of each expert had been padding."""
    narrow = {"k": 3 * BLOCKS, "v": 3 * BLOCKS, "experts_mid": SLICE}
    got = assemble([part_of(rank, ranks) for rank in range(ranks)], narrow)
    middle, k = whole().sites[1], whole().sites[2]
    halved = middle.bits.reshape(TOKENS, LAYERS, EXPERTS, -1)[..., :SLICE].reshape(TOKENS, LAYERS, -1)
    np.testing.assert_array_equal(got.sites[1].bits, halved)
    np.testing.assert_array_equal(got.sites[2].bits, k.bits[..., : 3 * BLOCKS])
    assert got.sites[2].codes is not None
    assert k.codes is not None
    np.testing.assert_array_equal(got.sites[2].codes, k.codes[..., : 24 * BLOCKS])


def test_rows_of_other_tokens_or_other_scales_are_not_put_together() -> None:
    other = replace(part_of(1), versions=np.array([0, 0, 2], dtype=np.int32))
    with pytest.raises(EngineError, match="rank 1 read other rows"):
        assemble([part_of(0), other], WIDTHS)
    sites = list(part_of(1).sites)
    sites[1] = replace(sites[1], global_log2=np.zeros((TOKENS, LAYERS, EXPERTS), dtype=np.int8))
    with pytest.raises(EngineError, match="experts_mid: ranks have other global scales"):
        assemble([part_of(0), replace(part_of(1), sites=tuple(sites))], WIDTHS)


def test_ranks_write_lanes_of_their_own_that_are_read_together(tmp_path: Path) -> None:
    reader = Telemetry(tmp_path, create=True, ranks=2)
    lanes = [Telemetry(tmp_path) for _ in range(2)]
    for rank, lane in enumerate(lanes):
        lane.lane = rank
        lane.add("saturated", 3)
        lane.add("weight_updates", 1)
    assert (reader.get("saturated"), reader.get("weight_updates")) == (6, 1)
    lanes[0].beat()
    assert reader.age_s() is None
    lanes[1].beat()
    age = reader.age_s()
    assert age is not None
    assert 0 <= age < 5


def test_every_rank_gets_cores() -> None:
    groups = _cores_of_ranks(2).split("|")
    assert len(groups) == 2
    assert all(core.isdigit() for group in groups for core in group.split(","))
    assert len(_cores_of_ranks(1000).split("|")) == 1000


def test_no_ranks_is_a_configuration_error(engine_model: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: got 0"):
        EngineProcess(EngineConfig(model=engine_model, tensor_parallel=0)).start()


@pytest.fixture(scope="module")
def tp2_engine(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("tp2")
    config = EngineConfig(
        model=fp4_policy.path,
        recipe=fp4_policy.recipe,
        hint_dir=directory / "hints",
        hints=HintOptions(sites=("experts_in", "k", "v", "experts_mid"), scale="byte"),
        log_path=directory / "engine.log",
        max_total_tokens=4096,
        chunked_prefill_size=64,
        tensor_parallel=2,
    )
    with EngineProcess(config) as engine:
        engine.wait_ready(480)
        yield engine


@pytest.mark.engine
def test_two_ranks_report_themselves_and_their_share(tp2_engine: EngineProcess) -> None:
    report = tp2_engine.request("/trace/report")
    assert report["tensor_parallel"] == 2
    assert report["ready"]
    packed = engine_model.HEAD_DIM // 2 + engine_model.HEAD_DIM // 16
    heads = engine_model.KV_HEADS // 2
    assert report["kv"]["bytes_per_token"] == engine_model.LAYERS * 2 * heads * packed


@pytest.mark.engine
def test_hints_of_two_ranks_are_those_of_one(tp2_engine: EngineProcess, fp4_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(71, 100)
    flush(fp4_engine)
    flush(tp2_engine)
    sites = {"sink": "inline", "sites": ["experts_in", "k", "v"], "scale": "byte"}
    one = decoded(generate(fp4_engine, prompt, new=1, hints=sites))
    two = decoded(generate(tp2_engine, prompt, new=1, hints=sites))
    assert [site.bits.shape for site in two.sites] == [site.bits.shape for site in one.sites]
    assert all(site.present.all() for site in two.sites)
    # K and V of the first layer come before any sum over ranks; behind it, two BF16 parts are summed and rounded.
    for name in ("k", "v"):
        np.testing.assert_array_equal(two.site(name).bits[:, 0], one.site(name).bits[:, 0])
    assert agreement(one, two) > 0.9


@pytest.mark.engine
def test_every_slice_of_the_second_product_is_there(tp2_engine: EngineProcess) -> None:
    hints = decoded(generate(tp2_engine, engine_model.token_ids(72, 30), new=4))
    middle = hints.site("experts_mid")
    assert middle.bits.shape == (33, engine_model.LAYERS, 2 * engine_model.INTERMEDIATE // 16)
    assert middle.present.all()
    halves_of_experts = middle.bits.reshape(33, engine_model.LAYERS, 2, 2, -1)
    assert (halves_of_experts != 0).any(axis=(0, 1, 4)).all()


@pytest.mark.engine
def test_two_ranks_answer_the_same_again_from_the_prefix_cache_and_in_a_batch(tp2_engine: EngineProcess) -> None:
    prompt = engine_model.token_ids(73, 80)
    flush(tp2_engine)
    cold, warm = (decoded(generate(tp2_engine, prompt, new=2)) for _ in range(2))
    assert_rows_equal(cold, warm, slice(0, 79))
    answers = together(tp2_engine, [body(engine_model.token_ids(74 + i, 20), new=8) for i in range(4)])
    for i, answer in enumerate(answers):
        hints = decoded(answer)
        assert hints.token_ids.tolist() == [*engine_model.token_ids(74 + i, 20), *answer["output_ids"][:-1]]
        assert all(site.present.all() for site in hints.sites)


@pytest.mark.engine
def test_one_rank_writes_the_file_and_counts_it_once(tp2_engine: EngineProcess) -> None:
    before = tp2_engine.request("/trace/report")["hint_files"]["written"]
    generate(tp2_engine, engine_model.token_ids(79, 12), new=2, hints="file", rid="two-ranks")
    path = wait_for(Path(str(tp2_engine.config.hint_dir)) / "two-ranks.safetensors")
    assert wire.read(path).rows == 13
    report = tp2_engine.request("/trace/report")
    assert report["hint_files"]["written"] == before + 1
    assert report["incidents"]["capture_mismatches"] == 0
