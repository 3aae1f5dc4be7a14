"""What every run of the Triton kernels must satisfy, in the interpreter and on a card: equality with the reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trace_serve import nvfp4
from trace_serve.kernels.triton import (
    KVBuffers,
    decode_attention,
    expert_product,
    gather_dequantize,
    group_by_expert,
    plan,
    quantize_rows,
    quantize_silu_and_mul,
    silu_and_mul,
    store_kv,
)
from trace_serve.kernels.triton.attention import decode_attention_reference
from trace_serve.kernels.triton.experts import expert_product_reference
from trace_serve.recipe import Recipe

RECIPE = Recipe()
POISON = 0x7F


def seeded(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def expected_rows(x, rotation, global_scale, counters):
    rotated = nvfp4.rotate(x, rotation)
    if global_scale is None:
        return nvfp4.quantize_tokens(rotated, RECIPE, counters=counters)
    g = global_scale
    if not isinstance(g, torch.Tensor):
        g = torch.full(x.shape[:1], g, device=x.device)
    return nvfp4.quantize(rotated, g, RECIPE, counters=counters)


def assert_rows(got, expected, counted, expected_counts):
    assert torch.equal(got.quantized.codes, expected.codes)
    assert torch.equal(got.quantized.scales, expected.scales)
    assert torch.equal(got.quantized.global_scale, expected.global_scale)
    assert torch.equal(bits(got.quantized.hints), bits(nvfp4.hint_bits(expected.codes)))
    values = nvfp4.dequantize(expected)
    assert torch.equal(got.values.isnan(), values.isnan())
    assert torch.equal(bits(got.values.nan_to_num()), bits(values.nan_to_num()))
    assert counted.tolist() == expected_counts.tolist()


def sglang_nvfp4_kv() -> ModuleType:
    """SGLang's own module for the trtllm-gen KV layout, loaded without the rest of SGLang."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    path = Path(package.origin).parent / "srt" / "layers" / "quantization" / "nvfp4_kv_cache.py"
    spec = importlib.util.spec_from_file_location("sglang_nvfp4_kv_cache", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RowCases:
    device: str

    def check(self, x, *, rotation=0, global_scale=None):
        x = x if x.device.type == self.device else x.to(self.device)
        if isinstance(global_scale, torch.Tensor):
            global_scale = global_scale.to(self.device)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        got = quantize_rows(x, rotation=rotation, global_scale=global_scale, counters=counted, hints=True, values=True)
        assert_rows(got, expected_rows(x, rotation, global_scale, expected_counts), counted, expected_counts)
        return got

    @pytest.mark.parametrize("rotation", [0, 64])
    def test_every_bf16_pattern(self, rotation):
        patterns = bits_to_bf16(torch.arange(65536, dtype=torch.int32))
        self.check(patterns.view(-1, 64), rotation=rotation)
        self.check(patterns.view(-1, 64), rotation=rotation, global_scale=0.3)

    @pytest.mark.parametrize("anchor", [0.0, 300.0])
    def test_every_bf16_pattern_beside_a_fixed_block_maximum(self, anchor):
        rows = torch.full((65536, 16), anchor, dtype=torch.bfloat16)
        rows[:, 7] = bits_to_bf16(torch.arange(65536, dtype=torch.int32))
        self.check(rows)
        self.check(rows, global_scale=1.0)

    @pytest.mark.parametrize("k", [16, 576, 704, 1536, 2880])
    def test_odd_shapes_with_each_kind_of_global_scale(self, k):
        x = (seeded(5, k) * 3).bfloat16()
        x[1] = 0
        x[2, 3] = float("nan")
        x[3, k - 1] = float("-inf")
        self.check(x)
        self.check(x, rotation=16)
        self.check(x, global_scale=0.25)
        self.check(x, global_scale=torch.tensor([0.1, 1.0, 3e-5, 77.0, 0.5]), rotation=16)
        self.check(x[:1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
    @pytest.mark.parametrize("scale", [2.0**-130, 1.0, 3e4, 1e37])
    def test_extreme_magnitudes_and_input_types(self, dtype, scale):
        x = (seeded(9, 256) * scale).to(dtype)
        self.check(x)
        self.check(x, rotation=128, global_scale=0.25)

    def test_exact_ties_go_to_the_even_code(self):
        ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0]
        got = self.check(torch.tensor([ties]).bfloat16(), global_scale=1.0)
        expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, 0.0]
        assert (got.values[0] + 0).tolist() == expected

    def test_a_row_of_zeros_gives_zeros_and_scale_one(self):
        got = self.check(torch.zeros(3, 2048, dtype=torch.bfloat16))
        assert got.quantized.global_scale.tolist() == [1.0] * 3
        assert not got.quantized.codes.any()
        assert not got.quantized.scales.any()

    @pytest.mark.parametrize(
        ("value", "global_scale", "expected"),
        [
            (float("inf"), None, [1, 0, 0]),
            (float("nan"), 1.0, [1, 0, 0]),
            (4000.0, 1.0, [0, 1, 0]),
            (2784.0, 1.0, [0, 0, 0]),
            (2.0**-12, 1.0, [0, 0, 1]),
        ],
    )
    def test_one_incident_alone_is_counted(self, value, global_scale, expected):
        x = torch.zeros(3, 704, dtype=torch.bfloat16, device=self.device)
        x[1, 333] = value
        counters = nvfp4.new_counters(self.device)
        quantize_rows(x, global_scale=global_scale, counters=counters)
        assert counters.tolist() == expected

    def test_no_rows_give_no_rows(self):
        got = quantize_rows(
            torch.zeros(0, 576, dtype=torch.bfloat16, device=self.device),
            rotation=64,
            hints=True,
            values=True,
        )
        assert got.quantized.codes.shape == (0, 288)
        assert got.quantized.scales.shape == got.quantized.hints.shape == (0, 36)
        assert got.values.shape == (0, 576)

    def test_a_row_does_not_depend_on_its_batch_mates(self):
        x = (seeded(6, 704) * torch.tensor([[1e-3], [1.0], [9e3], [0.0], [5.0], [1e9]])).bfloat16().to(self.device)
        together = quantize_rows(x, rotation=64).quantized
        for i in range(len(x)):
            alone = quantize_rows(x[i : i + 1], rotation=64).quantized
            assert torch.equal(alone.codes[0], together.codes[i])
            assert torch.equal(alone.scales[0], together.scales[i])

    @pytest.mark.parametrize("poison", [0x7F7F, 0x7FFF])
    @pytest.mark.parametrize("k", [48, 704, 2880])
    def test_what_lies_around_a_view_never_leaks(self, k, poison):
        around = torch.full((9, k + 64), poison, dtype=torch.int16).view(torch.bfloat16)
        inside = seeded(5, k).bfloat16()
        around[2:7, 32 : 32 + k] = inside
        around = around.to(self.device)
        for options in ({}, {"global_scale": 0.5}, {"rotation": 16}):
            view = self.check(around[2:7, 32 : 32 + k], **options).quantized
            copy = self.check(inside, **options).quantized
            assert torch.equal(view.codes, copy.codes)
            assert torch.equal(view.scales, copy.scales)

    @pytest.mark.parametrize(("k", "rotation"), [(576, 0), (1024, 64)])
    def test_rows_in_several_passes_and_steps(self, monkeypatch, k, rotation):
        def as_on_a_card(k_blocks):
            cut = plan.plan_rows(k_blocks, 10**6, rotation=rotation)
            assert cut.chunks > 1
            assert cut.steps > 1
            return cut

        monkeypatch.setattr(plan, "plan_rows_interpreted", as_on_a_card)
        x = seeded(9, k).bfloat16()
        x[4, 500] = float("inf")
        x[5, 7] = 1e30
        self.check(x, rotation=rotation)

    @pytest.mark.parametrize(("k", "rotation"), [(16, 0), (352, 16), (704, 64), (2880, 0)])
    def test_silu_and_mul_equals_its_definition_quantized(self, k, rotation):
        x = (seeded(8, 2 * k) * 4).bfloat16()
        x[1] = 0
        x[2, 3] = float("nan")
        x[3, :16] = -500.0
        x[4, 5] = float("-inf")
        x[5] *= 1e18
        x[6] = -3e38
        x = x.to(self.device)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        got = quantize_silu_and_mul(x, rotation=rotation, counters=counted, hints=True, values=True)
        expected = expected_rows(silu_and_mul(x), rotation, None, expected_counts)
        assert_rows(got, expected, counted, expected_counts)

    def test_silu_and_mul_of_every_bf16_gate(self):
        gate = bits_to_bf16(torch.arange(65536, dtype=torch.int32)).view(-1, 16)
        x = torch.cat((gate, torch.full_like(gate, 1.5)), dim=1).to(self.device)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        got = quantize_silu_and_mul(x, counters=counted, hints=True, values=True)
        assert_rows(got, expected_rows(silu_and_mul(x), 0, None, expected_counts), counted, expected_counts)


class KVCases:
    device: str

    def buffers(self, slots, heads, d, page, interleaved):
        outer = (slots // page, heads, page) if page else (slots, heads)

        def make(last):
            return torch.full((*outer, last), POISON, dtype=torch.uint8, device=self.device)

        return KVBuffers(make(d // 2), make(d // 2), make(d // 16), make(d // 16), interleaved)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize(
        ("heads", "d", "page", "interleaved", "rotation"),
        [
            (3, 64, 0, False, 64),
            (2, 128, 16, False, 0),
            (2, 128, 16, True, 128),
            (1, 256, 4, True, 16),
            (1, 16, 0, False, 0),
            (2, 64, 8, True, 32),
        ],
    )
    def test_stored_rows_are_the_reference_in_their_slots(self, heads, d, page, interleaved, rotation, dtype):
        tokens, slots = 21, 64
        fused = seeded(tokens, 3 * heads * d).to(dtype).to(self.device)
        k = fused[:, : heads * d].view(tokens, heads, d)
        v = fused[:, heads * d : 2 * heads * d].view(tokens, heads, d)
        v[3] *= 5000
        v[4, 0, 1] = float("nan")
        index = torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:tokens].to(self.device)
        index[5], index[6] = -1, slots
        buffers = self.buffers(slots, heads, d, page, interleaved)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        hints = store_kv(
            k,
            v,
            index,
            buffers,
            k_global_scale=0.5,
            v_global_scale=1.0,
            k_rotation=rotation,
            counters=counted,
            hints=True,
        )
        kept = (index >= 0) & (index < slots)
        sides = (
            (k, buffers.k_codes, buffers.k_scales, 0.5, rotation, hints[0], False),
            (v, buffers.v_codes, buffers.v_scales, 1.0, 0, hints[1], interleaved),
        )
        for x, codes, scales, g, width, hint, swizzled in sides:
            expected = expected_rows(x[kept].reshape(-1, d), width, g, expected_counts)
            got_codes, got_scales = linear_slots(codes, scales, swizzled)
            assert torch.equal(got_codes[index[kept]].view(-1, d // 2), expected.codes)
            assert torch.equal(got_scales[index[kept]].view(-1, d // 16), expected.scales)
            assert torch.equal(bits(hint)[kept].view(-1, d // 16), bits(nvfp4.hint_bits(expected.codes)))
            assert not bits(hint)[~kept].any()
            untouched = torch.ones(slots, dtype=torch.bool, device=self.device)
            untouched[index[kept]] = False
            assert (got_codes[untouched] == POISON).all()
            assert (got_scales[untouched] == POISON).all()
            read = gather_dequantize(codes, scales, index[kept], g, interleaved=swizzled)
            values = nvfp4.dequantize(expected).view(-1, heads, d)
            assert torch.equal(read.isnan(), values.isnan())
            assert torch.equal(bits(read.nan_to_num()), bits(values.nan_to_num()))
        assert counted.tolist() == expected_counts.tolist()

    def test_v_scales_are_where_sglang_looks_for_them(self):
        heads, d, page = 2, 128, 8
        k = v = seeded(page * 3, heads, d).bfloat16().to(self.device)
        index = torch.arange(page * 3, device=self.device)
        buffers = self.buffers(page * 3, heads, d, page, True)
        store_kv(k, v, index, buffers, k_global_scale=1.0, v_global_scale=1.0)
        linear = buffers.k_scales.cpu()
        token, scale = torch.meshgrid(torch.arange(page), torch.arange(d // 16), indexing="ij")
        to_token, to_scale = sglang_nvfp4_kv().nvfp4_v_scale_swizzle_indices(token, scale, d // 16)
        expected = torch.empty_like(linear)
        expected[:, :, to_token, to_scale] = linear
        assert torch.equal(buffers.v_scales.cpu(), expected)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_reading_v_back_errs_as_little_as_k_in_both_scale_layouts(self, interleaved):
        heads, d, page, tokens = 2, 128, 16, 64
        k, v = (seeded(tokens, heads, d, seed=s).bfloat16().to(self.device) for s in (1, 2))
        index = torch.arange(tokens, device=self.device)
        buffers = self.buffers(tokens, heads, d, page, interleaved)
        store_kv(k, v, index, buffers, k_global_scale=2.0**-6, v_global_scale=2.0**-6)
        k_read = gather_dequantize(buffers.k_codes, buffers.k_scales, index, 2.0**-6)
        v_read = gather_dequantize(buffers.v_codes, buffers.v_scales, index, 2.0**-6, interleaved=interleaved)
        k_error, v_error = ((a.float() - b.float()).square().mean() for a, b in ((k, k_read), (v, v_read)))
        assert 0.5 < float(v_error / k_error) < 2

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_gathering_equals_the_reference_for_every_byte(self, dtype):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat_interleave(16).view(64, 2, 32)
        scales = torch.arange(512, dtype=torch.int32).to(torch.uint8).view(64, 2, 4)
        codes, scales = codes.to(self.device), scales.to(self.device)
        index = torch.tensor([63, 0, 0, 17, 5, *range(64)], dtype=dtype, device=self.device)
        for g in (1.0, 2.0**-20, 2.0**30):
            got = gather_dequantize(codes, scales, index, g)
            expected = nvfp4.dequantize(
                nvfp4.Quantized(codes[index], scales[index], torch.tensor(g, device=self.device))
            )
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(bits(got.nan_to_num()), bits(expected.nan_to_num()))

    def test_no_tokens_store_nothing_and_read_nothing(self):
        buffers = self.buffers(8, 2, 64, 0, False)
        empty = torch.zeros(0, 2, 64, dtype=torch.bfloat16, device=self.device)
        index = torch.zeros(0, dtype=torch.int64, device=self.device)
        hints = store_kv(empty, empty, index, buffers, k_global_scale=1.0, v_global_scale=1.0, hints=True)
        assert hints[0].shape == hints[1].shape == (0, 2, 4)
        assert (buffers.k_codes == POISON).all()
        assert gather_dequantize(buffers.k_codes, buffers.k_scales, index, 1.0).shape == (0, 2, 64)


class ExpertCases:
    device: str

    def weight(self, experts, n, k):
        x = (seeded(experts * n, k, seed=3) * 0.05).bfloat16()
        q = nvfp4.quantize(x, torch.full(x.shape[:1], 2.0**-7), RECIPE)
        # Between two experts that must never be read.
        codes, scales = (torch.full((experts + 2, n, last), POISON, dtype=torch.uint8) for last in (k // 2, k // 16))
        codes[1:-1], scales[1:-1] = q.codes.view(experts, n, -1), q.scales.view(experts, n, -1)
        g = torch.linspace(0.5, 1.5, experts)
        codes, scales = codes.to(self.device), scales.to(self.device)
        return nvfp4.Quantized(codes[1:-1], scales[1:-1], g.to(self.device))

    def rows(self, n, k, *, fp4):
        around = torch.full((n + 2, k), float("nan"), dtype=torch.bfloat16)
        around[1:-1] = seeded(n, k, seed=4).bfloat16()
        x = around.to(self.device)[1:-1]
        return nvfp4.quantize_tokens(x, RECIPE) if fp4 else x

    def check(self, x, weight, ids, pairs, rows=None):
        tiles = group_by_expert(ids, weight.codes.shape[0], rows)
        got = expert_product(x, weight, tiles, pairs=pairs, out_dtype=torch.float32)
        expected = expert_product_reference(x, weight, ids, pairs=pairs)
        assert ((got - expected).abs() <= 2.0**-14 * magnitude(x, weight, ids, pairs)).all()
        rounded = expert_product(x, weight, tiles, pairs=pairs)
        assert torch.equal(rounded, got.to(torch.bfloat16))
        return got

    @pytest.mark.parametrize("fp4", [False, True])
    @pytest.mark.parametrize(("n", "k", "rows"), [(136, 2880, 16), (352, 704, 16), (64, 352, 32), (128, 16, 64)])
    def test_each_pair_meets_its_expert(self, n, k, rows, fp4):
        ids = torch.tensor([[0, 3], [3, 1], [1, -1], [3, 0], [7, 3]], device=self.device)
        weight = self.weight(5, n, k)
        first = self.check(self.rows(5, k, fp4=fp4), weight, ids, 10, rows)
        assert not first[[5, 8]].any()
        self.check(self.rows(10, k, fp4=fp4), weight, ids, 10, rows)

    @pytest.mark.parametrize("fp4", [False, True])
    def test_an_expert_gives_what_it_gives_alone(self, fp4):
        n, k, experts = 64, 2880, 3
        weight, x = self.weight(experts, n, k), self.rows(4, k, fp4=fp4)
        for e in range(experts):
            ids = torch.full((4, 1), e, device=self.device)
            together = self.check(x, weight, ids, 4)
            alone = nvfp4.Quantized(weight.codes[e : e + 1], weight.scales[e : e + 1], weight.global_scale[e : e + 1])
            assert torch.equal(together, self.check(x, alone, torch.zeros_like(ids), 4))

    @pytest.mark.parametrize("fp4", [False, True])
    def test_no_tokens_give_no_rows(self, fp4):
        weight = self.weight(3, 32, 64)
        ids = torch.zeros(0, 2, dtype=torch.int64, device=self.device)
        got = expert_product(self.rows(0, 64, fp4=fp4), weight, group_by_expert(ids, 3), pairs=0)
        assert got.shape == (0, 32)

    @pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (37, 16), (200, 32), (500, 128)])
    def test_grouping_places_every_pair_once_in_a_tile_of_its_expert(self, tokens, rows):
        experts = 6
        ids = torch.randint(-1, experts + 1, (tokens, 3), generator=torch.Generator().manual_seed(tokens))
        ids[ids == 2] = 3
        ids = ids.to(self.device)
        tiles = group_by_expert(ids, experts, rows)
        pairs = tiles.pairs.view(-1, rows)
        owner = tiles.experts[:, None].expand_as(pairs)
        used = pairs >= 0
        assert torch.equal(ids.flatten()[pairs[used].long()], owner[used].long())
        wanted = ((ids.flatten() >= 0) & (ids.flatten() < experts)).nonzero().flatten()
        assert torch.equal(pairs[used].sort().values.long(), wanted)
        assert not (used & (owner < 0)).any()


def magnitude(x, weight, ids, pairs):
    """The sum of |x * w| of each product, which its rounding errors are proportional to."""

    def absolute(q):
        return nvfp4.Quantized(q.codes & 0x77, q.scales, q.global_scale)

    x = absolute(x) if isinstance(x, nvfp4.Quantized) else x.abs()
    return expert_product_reference(x, absolute(weight), ids, pairs=pairs)


class AttentionCases:
    device: str

    def buffers(self, slots, heads, d, page, interleaved):
        return KVCases.buffers(self, slots, heads, d, page, interleaved)

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize(
        ("heads", "group", "d", "page", "interleaved"),
        [(2, 3, 64, 0, False), (1, 8, 128, 16, True), (2, 1, 256, 4, True), (3, 2, 96, 8, False)],
    )
    def test_decode_attends_to_the_stored_tokens(self, heads, group, d, page, interleaved, splits):
        slots, used = 256, 230
        buffers = self.buffers(slots, heads, d, page, interleaved)
        k, v = (seeded(used, heads, d, seed=s).bfloat16().to(self.device) for s in (1, 2))
        place = torch.randperm(slots, generator=torch.Generator().manual_seed(5))[:used].to(self.device)
        store_kv(k, v, place, buffers, k_global_scale=0.25, v_global_scale=0.5)
        starts = torch.tensor([0, 129, 129, 130, used], dtype=torch.int32, device=self.device)
        q = (seeded(4, heads * group, d, seed=6) * 3).bfloat16().to(self.device)
        options = {"softmax_scale": d**-0.5, "k_global_scale": 0.25, "v_global_scale": 0.5}
        got = decode_attention(q, buffers, starts, place, **options, splits=splits)
        expected, mean_v = decode_attention_reference(q, buffers, starts, place, **options)
        assert got.dtype == torch.bfloat16
        assert ((got - expected).abs() <= 2.0**-8 * (mean_v + expected.abs())).all()
        assert not got[1].any()

    def test_no_requests_give_no_rows(self):
        buffers = self.buffers(8, 2, 64, 0, False)
        got = decode_attention(
            torch.zeros(0, 4, 64, dtype=torch.bfloat16, device=self.device),
            buffers,
            torch.zeros(1, dtype=torch.int32, device=self.device),
            torch.zeros(0, dtype=torch.int64, device=self.device),
            softmax_scale=0.1,
            k_global_scale=1.0,
            v_global_scale=1.0,
            splits=2,
        )
        assert got.shape == (0, 4, 64)

    def test_a_damaged_token_makes_its_request_nan_and_no_other(self):
        buffers = self.buffers(8, 1, 64, 0, False)
        k = v = seeded(8, 1, 64).bfloat16().to(self.device)
        k = k.clone()
        k[6, 0, 3] = float("nan")
        index = torch.arange(8, device=self.device)
        store_kv(k, v, index, buffers, k_global_scale=1.0, v_global_scale=1.0)
        starts = torch.tensor([0, 4, 8], device=self.device)
        q = seeded(2, 1, 64).bfloat16().to(self.device)
        scales = {"softmax_scale": 0.1, "k_global_scale": 1.0, "v_global_scale": 1.0}
        got = decode_attention(q, buffers, starts, index, **scales, splits=2)
        assert got[0].isfinite().all()
        assert got[1].isnan().all()


def linear_slots(codes, scales, interleaved):
    """Buffers of either layout as [slots, heads, ...] with linear scales; the permutation is SGLang's."""
    if codes.dim() == 3:
        return codes, scales
    if interleaved:
        page, width = scales.shape[2:]
        token, scale = torch.meshgrid(torch.arange(page), torch.arange(width), indexing="ij")
        at_token, at_scale = sglang_nvfp4_kv().nvfp4_v_scale_swizzle_indices(token, scale, width)
        scales = scales[:, :, at_token.to(scales.device), at_scale.to(scales.device)]
    return codes.transpose(1, 2).flatten(0, 1), scales.transpose(1, 2).flatten(0, 1)


def bits_to_bf16(patterns):
    return patterns.to(torch.int16).view(torch.bfloat16)
