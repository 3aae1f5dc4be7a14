"""Prepared weights lie as FlashInfer's and SGLang's own helpers put them."""

import pytest
import torch
from flashinfer_library import load
from library_stages import scales_in_row_order

from trace_serve.errors import ShapeError
from trace_serve.kernels.flashinfer import prepare_weights
from trace_serve.nvfp4 import Quantized

EXPERTS, HIDDEN, WIDTH = 3, 256, 128


def random_weight(experts: int, rows: int, k: int, seed: int) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 0x7F, (experts, rows, k // 16), generator=generator, dtype=torch.uint8)
    return Quantized(codes, scales, torch.arange(1.0, experts + 1))


@pytest.fixture(scope="module")
def layer():
    load("flashinfer")
    w13, w2 = random_weight(EXPERTS, 2 * WIDTH, HIDDEN, 1), random_weight(EXPERTS, HIDDEN, WIDTH, 2)
    return w13, w2, prepare_weights(w13, w2)


def up_then_gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.cat((up, gate), dim=1)


def test_w13_rows_are_interleaved_as_by_flashinfer(layer):
    w13, _, prepared = layer
    interleave = load("flashinfer.fused_moe.prepare")._interleave_linear_and_gate
    assert torch.equal(prepared.w13, interleave(up_then_gate(w13.codes), group_size=64, dim=1))


def test_w13_rows_are_interleaved_as_by_sglang(layer):
    w13, _, prepared = layer
    interleave = load("sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl").interleave_w13_halves
    assert torch.equal(prepared.w13, interleave(up_then_gate(w13.codes), group_size=64, dim=1))


def test_scales_are_where_flashinfer_reads_them(layer):
    w13, w2, prepared = layer
    helpers = load("flashinfer.cute_dsl.utils")
    unswizzle = load("flashinfer.trace.templates.gemm")._unswizzle_sf_128x4
    interleave = load("flashinfer.fused_moe.prepare")._interleave_linear_and_gate
    for view, rows, k, expected in (
        (prepared.w13_scales, 2 * WIDTH, HIDDEN, interleave(up_then_gate(w13.scales), group_size=64, dim=1)),
        (prepared.w2_scales, HIDDEN, WIDTH, w2.scales),
    ):
        tiles = helpers.convert_sf_from_mma_layout(view, m=rows, k=k, num_groups=EXPERTS)
        for expert, flat in enumerate(tiles.reshape(EXPERTS, -1)):
            assert torch.equal(unswizzle(flat, rows, k // 16), expected[expert])
        assert torch.equal(scales_in_row_order(view), expected)


def test_w2_codes_and_global_scales_are_kept(layer):
    w13, w2, prepared = layer
    assert torch.equal(prepared.w2, w2.codes)
    assert torch.equal(prepared.w13_global, w13.global_scale)
    assert torch.equal(prepared.w2_global, w2.global_scale)


def test_sizes_that_are_not_multiples_of_128_are_padded_with_zeros_gate_and_up_apart():
    hidden, intermediate = 192, 352
    w13, w2 = random_weight(2, 2 * intermediate, hidden, 3), random_weight(2, hidden, intermediate, 4)
    prepared = prepare_weights(w13, w2)
    assert (prepared.hidden_padded, prepared.intermediate_padded) == (256, 384)
    assert (prepared.hidden, prepared.intermediate) == (hidden, intermediate)
    for prepared_rows, kept, width in (
        (prepared.w13, w13.codes, hidden // 2),
        (scales_in_row_order(prepared.w13_scales), w13.scales, hidden // 16),
    ):
        up, gate = prepared_rows.reshape(2, -1, 2, 64, prepared_rows.shape[-1]).unbind(dim=2)
        for half, expected in zip((gate.flatten(1, 2), up.flatten(1, 2)), kept.chunk(2, dim=1), strict=True):
            assert torch.equal(half[:, :intermediate, :width], expected)
            assert not half[:, intermediate:].any()
            assert not half[..., width:].any()


def test_one_global_scale_an_expert_may_come_once_a_row():
    w13, w2 = random_weight(EXPERTS, 2 * WIDTH, HIDDEN, 1), random_weight(EXPERTS, HIDDEN, WIDTH, 2)
    by_row = Quantized(w13.codes, w13.scales, w13.global_scale[:, None].expand(EXPERTS, 2 * WIDTH))
    assert torch.equal(prepare_weights(by_row, w2).w13_global, w13.global_scale)


def test_a_split_gate_and_up_scale_is_refused():
    w13, w2 = random_weight(EXPERTS, 2 * WIDTH, HIDDEN, 1), random_weight(EXPERTS, HIDDEN, WIDTH, 2)
    split = w13.global_scale[:, None].repeat(1, 2 * WIDTH)
    split[0, WIDTH:] *= 2
    with pytest.raises(ShapeError, match="w13: an expert's rows have different global scales") as caught:
        prepare_weights(Quantized(w13.codes, w13.scales, split), w2)
    assert caught.value.field == "w13"


@pytest.mark.parametrize(
    ("name", "w13", "w2"),
    [
        ("w13", Quantized(torch.zeros(1, 64, 12, dtype=torch.uint8), torch.zeros(1), torch.ones(1)), (1, 128, 64)),
        ("w2", (1, 128, 64), (1, 128, 64)),
        ("w2", (1, 128, 64), (2, 64, 64)),
    ],
)
def test_weights_that_do_not_fit_each_other_are_refused_by_name(name, w13, w2):
    built = [w if isinstance(w, Quantized) else random_weight(*w, 5) for w in (w13, w2)]
    with pytest.raises(ShapeError) as caught:
        prepare_weights(*built)
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["scales", "global_scale"])
def test_scales_of_another_shape_or_dtype_are_refused(name):
    w13, w2 = random_weight(EXPERTS, 2 * WIDTH, HIDDEN, 1), random_weight(EXPERTS, HIDDEN, WIDTH, 2)
    parts = {"codes": w13.codes, "scales": w13.scales, "global_scale": w13.global_scale}
    parts[name] = parts[name].double()
    with pytest.raises(ShapeError, match="w13: got " + ("scales" if name == "scales" else "global_scale")):
        prepare_weights(Quantized(**parts), w2)
