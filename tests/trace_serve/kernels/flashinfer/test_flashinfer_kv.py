"""The paged cache is written as trtllm-gen attention reads it, under any recipe; what it cannot read is refused."""

import pytest
import torch
from flashinfer_library import load

from trace_serve import nvfp4
from trace_serve.errors import ShapeError
from trace_serve.kernels import kernels_for
from trace_serve.kernels.flashinfer import append_kv, decode_attention, paged_buffers, workspace
from trace_serve.kernels.flashinfer.kv import WORKSPACE_BYTES, e4m3_queries
from trace_serve.kernels.triton.kv import KVBuffers
from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import PRESETS, Recipe

PAGES, HEADS, PAGE, D = 6, 2, 8, 128
K_SCALE, V_SCALE = 0.25, 0.5
SLOTS = torch.tensor([3, 40, 11, 8, 47, 22, -1, 9, 10, PAGES * PAGE])
RECIPES = {"portable": Recipe(), "gb200": PRESETS["gb200"], "rotated": Recipe(k_rotation=32)}


def keys_and_values(tokens: int = len(SLOTS)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(tokens, HEADS, D, generator=generator) * 3 for _ in range(2))
    return k.to(torch.bfloat16), v.to(torch.bfloat16)


def append(recipe: Recipe, buffers: KVBuffers, slots: torch.Tensor = SLOTS, **options):
    k, v = keys_and_values(len(slots))
    scales = {"k_global_scale": K_SCALE, "v_global_scale": V_SCALE}
    return append_kv(kernels_for(recipe), k, v, slots, buffers, **scales, **options)


def of_slots(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return buffer[slots // PAGE, :, slots % PAGE]


@pytest.mark.parametrize("name", RECIPES)
def test_every_slot_holds_what_the_recipe_rounds_and_others_stay(name):
    recipe = RECIPES[name]
    buffers = paged_buffers(PAGES, HEADS, PAGE, D, "cpu")
    bits = append(recipe, buffers, hints=True)
    written = (SLOTS >= 0) & (SLOTS < PAGES * PAGE)
    slots = SLOTS[written]
    v_scales = nvfp4.deinterleave_v(buffers.v_scales)
    for x, g, width, codes, scales, word in zip(
        keys_and_values(),
        (K_SCALE, V_SCALE),
        (recipe.k_rotation, 0),
        (buffers.k_codes, buffers.v_codes),
        (buffers.k_scales, v_scales),
        bits,
        strict=True,
    ):
        want = nvfp4.quantize(nvfp4.rotate(x[written], width), g, recipe, operand="kv")
        assert torch.equal(of_slots(codes, slots), want.codes)
        assert torch.equal(of_slots(scales, slots), want.scales)
        assert torch.equal(word[written].int(), nvfp4.hint_bits(want.codes).int())
        assert not word[~written].int().any()
        rest = [s for s in range(PAGES * PAGE) if s not in slots.tolist()]
        assert not of_slots(codes, torch.tensor(rest)).any()
        assert not of_slots(scales, torch.tensor(rest)).any()


def test_v_scales_lie_where_sglang_puts_them_for_these_kernels():
    indices = load("sglang.srt.layers.quantization.nvfp4_kv_cache").nvfp4_v_scale_swizzle_indices
    buffers = paged_buffers(PAGES, HEADS, PAGE, D, "cpu")
    slots = torch.arange(PAGE) + 2 * PAGE
    append(Recipe(), buffers, slots)
    _, v = keys_and_values(PAGE)
    want = nvfp4.quantize(v, V_SCALE, Recipe(), operand="kv").scales
    token, column = torch.meshgrid(torch.arange(PAGE), torch.arange(D // 16), indexing="ij")
    there, place = indices(token, column, D // 16)
    for head in range(HEADS):
        assert torch.equal(buffers.v_scales[2, head][there, place], want[:, head])


def test_a_position_written_alone_disturbs_none_of_the_three_that_share_its_lines():
    buffers = paged_buffers(PAGES, HEADS, PAGE, D, "cpu")
    append(Recipe(), buffers, torch.arange(4))
    before = nvfp4.deinterleave_v(buffers.v_scales)[0].clone()
    append(Recipe(), buffers, torch.tensor([2]))
    after = nvfp4.deinterleave_v(buffers.v_scales)[0]
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    assert not torch.equal(after[:, 2], before[:, 2])


@pytest.mark.parametrize("slots", [torch.empty(0, dtype=torch.int64), torch.tensor([-1, -1])])
def test_no_tokens_and_padding_alone_write_nothing(slots):
    buffers = paged_buffers(PAGES, HEADS, PAGE, D, "cpu")
    bits = append(Recipe(), buffers, slots, hints=True)
    assert tuple(bits[0].shape) == (len(slots), HEADS, D // 16)
    assert not buffers.k_codes.any()
    assert not buffers.v_scales.any()


def test_flashinfers_kv_reference_is_equal_but_for_ties_and_zero_blocks_in_its_formula():
    reference = load("flashinfer.trace.templates.quantize")._nvfp4_kv_quantize_reference
    k, _ = keys_and_values()
    rows = k.reshape(-1, D)
    _, scales = reference(rows, torch.tensor([1 / K_SCALE]))
    named = nvfp4.quantize(rows, K_SCALE, Recipe(kv_scale_formula="amax_over_six"), operand="kv")
    assert torch.equal(scales.view(torch.uint8).reshape(named.scales.shape), named.scales)


def test_the_gb200_kv_formula_is_within_one_step_of_flashinfers_reference():
    reference = load("flashinfer.trace.templates.quantize")._nvfp4_kv_quantize_reference
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(2048, D, generator=generator).to(torch.bfloat16)
    g = 0.0123
    _, scales = reference(rows, torch.tensor([1 / g]))
    ours = nvfp4.quantize(rows, g, PRESETS["gb200"], operand="kv").scales
    apart = (scales.view(torch.uint8).reshape(ours.shape).int() - ours.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01


# Refusals at the door.


@pytest.mark.parametrize(("page", "head_dim", "field"), [(6, 128, "page"), (0, 128, "page"), (8, 96, "head_dim")])
def test_sizes_that_the_kernels_cannot_read_are_refused_by_name(page, head_dim, field):
    with pytest.raises(ShapeError, match=f"{field}: got {page if field == 'page' else head_dim}") as caught:
        paged_buffers(PAGES, HEADS, page, head_dim, "cpu")
    assert caught.value.field == field


def slot_buffers() -> KVBuffers:
    return KVBuffers(*(torch.zeros(8, HEADS, d, dtype=torch.uint8) for d in (64, 64, 8, 8)))


def linear_buffers() -> KVBuffers:
    return KVBuffers(*(torch.zeros(PAGES, HEADS, PAGE, d, dtype=torch.uint8) for d in (64, 64, 8, 8)))


@pytest.mark.parametrize(("build", "field"), [(slot_buffers, "buffers"), (linear_buffers, "v_interleaved")])
def test_buffers_in_another_layout_are_refused_by_append_and_decode(build, field):
    with pytest.raises(ShapeError) as caught:
        append(Recipe(), build())
    assert caught.value.field == field
    with pytest.raises(ShapeError) as caught:
        decode(buffers=build())
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["k", "v", "index"])
def test_rows_that_do_not_fit_the_buffers_are_refused_by_name(name):
    k, v = keys_and_values()
    arguments = {"k": k, "v": v, "index": SLOTS}
    arguments[name] = SLOTS.float() if name == "index" else arguments[name][..., :-16]
    scales = {"k_global_scale": K_SCALE, "v_global_scale": V_SCALE}
    with pytest.raises(ShapeError) as caught:
        append_kv(kernels_for(Recipe()), **arguments, buffers=paged_buffers(PAGES, HEADS, PAGE, D, "cpu"), **scales)
    assert caught.value.field == name


def decode(**changes):
    arguments = {
        "q": torch.zeros(2, 4, D, dtype=torch.bfloat16),
        "buffers": paged_buffers(PAGES, HEADS, PAGE, D, "cpu"),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
        "scratch": torch.zeros(1, dtype=torch.uint8).expand(WORKSPACE_BYTES),
        "longest": 20,
    }
    return decode_attention(**(arguments | changes), softmax_scale=0.1, k_global_scale=K_SCALE, v_global_scale=V_SCALE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(2, 3, D, dtype=torch.bfloat16)),
        ("q", torch.zeros(2, 4, D)),
        ("q", torch.zeros(2, 4, 64, dtype=torch.bfloat16)),
        ("block_tables", torch.zeros(2, 3, dtype=torch.int64)),
        ("block_tables", torch.zeros(3, 3, dtype=torch.int32)),
        ("block_tables", torch.zeros(6, dtype=torch.int32)),
        ("lengths", torch.ones(3, dtype=torch.int32)),
        ("lengths", torch.ones(2)),
        ("longest", 25),
        ("longest", 0),
        ("scratch", torch.zeros(16, dtype=torch.uint8)),
        ("scratch", torch.zeros(WORKSPACE_BYTES // 4, dtype=torch.int32)),
    ],
)
def test_decode_refuses_by_name_what_does_not_fit(name, value):
    with pytest.raises(ShapeError) as caught:
        decode(**{name: value})
    assert caught.value.field == name


def test_a_decode_of_no_requests_needs_no_card():
    out = decode(
        q=torch.zeros(0, 4, D, dtype=torch.bfloat16),
        block_tables=torch.zeros(0, 3, dtype=torch.int32),
        lengths=torch.zeros(0, dtype=torch.int32),
    )
    assert (tuple(out.shape), out.dtype) == ((0, 4, D), torch.bfloat16)


def test_queries_beyond_e4m3_are_clamped_and_never_become_nan():
    q = torch.tensor([500.0, -70000.0, 1.0625, 0.0, 448.0], dtype=torch.bfloat16)
    assert e4m3_queries(q).float().tolist() == [448.0, -448.0, 1.0, 0.0, 448.0]


def test_scratch_memory_is_zeros():
    scratch = workspace("cpu")
    assert (scratch.dtype, scratch.numel()) == (torch.uint8, WORKSPACE_BYTES)
    assert not scratch[:1024].any()


def test_dequantizing_a_page_gives_back_v_with_its_own_error_about_that_of_k():
    buffers = paged_buffers(PAGES, HEADS, PAGE, D, "cpu")
    slots = torch.arange(PAGE)
    append(Recipe(), buffers, slots)
    k, v = keys_and_values(PAGE)
    errors = []
    for x, g, codes, scales in (
        (k, K_SCALE, buffers.k_codes, buffers.k_scales),
        (v, V_SCALE, buffers.v_codes, nvfp4.deinterleave_v(buffers.v_scales)),
    ):
        read = nvfp4.dequantize(Quantized(of_slots(codes, slots), of_slots(scales, slots), torch.tensor(g)))
        errors.append(((read.float() - x.float()).norm() / x.float().norm()).item())
    assert max(errors) < 0.12
    assert max(errors) < 1.2 * min(errors)
