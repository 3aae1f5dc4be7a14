"""Sizes that are not multiples of the tiles, and padding that is not zero: what has broken other engines."""

import pytest
import torch

from trace_serve.kernels import kernels_for
from trace_serve.nvfp4 import (
    Quantized,
    dequantize,
    quantize_tokens,
    quantize_weight,
    swizzle,
    swizzled_size,
    unswizzle,
)
from trace_serve.recipe import Recipe

POISON = 0x7F
RECIPE = Recipe()
LAYOUTS = pytest.mark.parametrize("layout", ["128x4", "8x4", "linear"])


def product(x: Quantized, w: Quantized) -> torch.Tensor:
    return dequantize(x, torch.float32) @ dequantize(w, torch.float32).T


@LAYOUTS
@pytest.mark.parametrize("rows", [1, 100, 127, 129])
def test_scale_padding_of_rows_leaves_the_product_unchanged(layout, rows):
    generator = torch.Generator().manual_seed(rows)
    x = quantize_tokens(torch.randn(rows, 176, generator=generator), RECIPE)
    w = quantize_weight(torch.randn(40, 176, generator=generator), RECIPE)
    stored = swizzle(x.scales, layout, fill=POISON)
    read = Quantized(x.codes, unswizzle(stored, rows, 11, layout), x.global_scale)
    assert torch.equal(product(read, w), product(x, w))


@LAYOUTS
def test_w2_padding_of_a_hidden_size_of_2880_gives_every_expert_its_own_product(layout):
    experts, hidden, inner, padded_hidden = 3, 2880, 64, 2944
    generator = torch.Generator().manual_seed(1)
    x = quantize_tokens(torch.randn(5, inner, generator=generator), RECIPE)
    weights = torch.randn(experts, hidden, inner, generator=generator)
    w2 = quantize_weight(weights, RECIPE)
    # Scales of all experts lie in one buffer whose rows are padded, while the codes are not.
    padded = torch.full((experts, padded_hidden, inner // 16), POISON, dtype=torch.uint8)
    padded[:, :hidden] = w2.scales
    stored = swizzle(padded, layout, fill=POISON)
    for expert in range(experts):
        read = unswizzle(stored[expert], padded_hidden, inner // 16, layout)[:hidden]
        got = product(x, Quantized(w2.codes[expert], read, w2.global_scale[expert]))
        assert torch.equal(got, product(x, quantize_weight(weights[expert], RECIPE)))


@LAYOUTS
def test_split_704_pads_gate_and_up_separately(layout):
    gate_rows, hidden = 352, 64
    w = torch.randn(2 * gate_rows, hidden, generator=torch.Generator().manual_seed(2))
    q = quantize_weight(w, RECIPE, parts=2)
    halves = [swizzle(part, layout, fill=POISON) for part in q.scales.chunk(2)]
    assert {half.numel() for half in halves} == {swizzled_size(gate_rows, 4, layout)}
    read = torch.cat([unswizzle(half, gate_rows, 4, layout) for half in halves])
    assert torch.equal(read, q.scales)
    joint = swizzle(q.scales, layout, fill=POISON)
    # 352 rows do not fill tiles of 128, so two padded halves are not the padded whole.
    assert torch.equal(torch.cat(halves), joint) is (layout != "128x4")


@pytest.mark.parametrize("size", [352, 704, 2880])
def test_reduction_sizes_that_are_not_multiples_of_128_are_quantized_whole(size):
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(3), dtype=torch.float32).to(torch.bfloat16)
    kernels = kernels_for(RECIPE)
    values, kept = kernels.fake_quantize_activations(x)
    assert torch.equal(kept.codes, quantize_tokens(x, RECIPE).codes)
    assert kept.scales.shape == (3, size // 16)
    assert (values.float() - x.float()).norm() < 0.12 * x.float().norm()


def test_an_empty_expert_and_an_empty_batch_give_no_rows_and_a_product_of_none():
    w = quantize_weight(torch.randn(32, 64), RECIPE)
    empty = quantize_tokens(torch.zeros(0, 64), RECIPE)
    assert product(empty, w).shape == (0, 32)
    assert swizzle(empty.scales, "128x4").numel() == 0
