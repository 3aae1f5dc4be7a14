import math

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import (
    Quantized,
    count_incidents,
    dequantize,
    e4m3,
    fake_quantize,
    quantize,
    quantize_tokens,
    unpack,
    weight_global_scale,
)
from trace_serve.recipe import Recipe

RECIPE = Recipe()


def finite_bf16() -> torch.Tensor:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


@pytest.mark.parametrize("g", [1.0, 2.0**-7, 2.0**4, 0.37, 2.0**-100, 2.0**116])
@pytest.mark.parametrize("anchor", [None, 0.0, 1.0, 2688.0])
def test_every_bf16_value_gets_the_codes_of_the_brute_force_search(g, anchor):
    values = finite_bf16()
    if anchor is None:
        blocks = values[: len(values) // 16 * 16].reshape(-1, 16)
    else:
        blocks = torch.full((len(values), 16), anchor, dtype=torch.bfloat16)
        blocks[:, 3] = values
    codes, scales = oracle.quantize_blocks(blocks.float().numpy(), g)
    got = quantize(blocks, g, RECIPE)
    assert np.array_equal(got.scales.ravel().numpy(), scales)
    assert np.array_equal(unpack(got.codes).numpy(), codes)


def test_random_fp32_gets_the_codes_of_the_brute_force_search():
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 2000).unsqueeze(1)
    got = quantize_tokens(x, RECIPE)
    for g in got.global_scale.unique().tolist():
        rows = got.global_scale == g
        codes, scales = oracle.quantize_blocks(x[rows].numpy(), g)
        assert np.array_equal(unpack(got.codes[rows]).numpy(), codes)
        assert np.array_equal(got.scales[rows].ravel().numpy(), scales)


@pytest.mark.parametrize("log2", range(-100, 117, 9))
def test_bf16_holds_every_value_exactly_under_a_power_of_two(log2):
    scales = torch.arange(127, dtype=torch.int32).to(torch.uint8).repeat_interleave(1).unsqueeze(1)
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).expand(127, 8)
    q = Quantized(codes, scales, torch.tensor(2.0**log2))
    assert torch.equal(dequantize(q, torch.bfloat16).float(), dequantize(q, torch.float32))
    assert dequantize(q, torch.bfloat16).isfinite().all()


def test_quantizing_the_kept_values_again_changes_nothing():
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    g = quantize_tokens(x, RECIPE).global_scale
    once = fake_quantize(x, g, RECIPE)
    assert once.dtype == torch.bfloat16
    assert torch.equal(fake_quantize(once, g, RECIPE), once)


def test_a_row_of_zeros_gives_zeros_and_no_infinity():
    q = quantize_tokens(torch.zeros(2, 32, dtype=torch.bfloat16), RECIPE)
    assert q.global_scale.tolist() == [1.0, 1.0]
    assert q.codes.count_nonzero() == 0
    assert q.scales.count_nonzero() == 0
    assert torch.equal(dequantize(q), torch.zeros(2, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_reads_back_as_nan_in_its_block_only_and_is_counted(bad):
    x = torch.randn(3, 64)
    clean = quantize_tokens(x, RECIPE)
    peak = x[1].abs().argmax()
    position = 5 if peak // 16 != 0 else 37
    x[1, position] = bad
    q = quantize_tokens(x, RECIPE)
    block = position // 16
    assert q.scales[1, block] == e4m3.NAN_BYTE
    back = dequantize(q)
    assert back[1, block * 16 : block * 16 + 16].isnan().all()
    assert back.isnan().sum() == 16
    assert torch.equal(q.global_scale, clean.global_scale)
    assert count_incidents(x, q.global_scale, RECIPE)["nonfinite"] == 1


def test_an_unusable_row_gets_a_finite_global_scale():
    q = quantize_tokens(torch.full((1, 16), math.nan), RECIPE)
    assert q.global_scale.item() == 1.0
    assert dequantize(q).isnan().all()


def test_saturation_is_counted_by_value():
    x = torch.full((1, 32), 1.0)
    x[0, 0] = 5000.0
    x[0, 1] = -4000.0
    assert count_incidents(x, 1.0, RECIPE) == {"nonfinite": 0, "saturated": 2, "underflow_blocks": 0}
    assert fake_quantize(x, 1.0, RECIPE)[0, :2].tolist() == [2688.0, -2688.0]


def test_a_block_that_rounds_away_is_counted_and_a_zero_block_is_not():
    x = torch.zeros(1, 48)
    x[0, 0] = 2.0**-12
    x[0, 40] = 1.0
    assert count_incidents(x, 1.0, RECIPE) == {"nonfinite": 0, "saturated": 0, "underflow_blocks": 1}


def test_a_per_token_scale_never_saturates_over_the_range_of_bf16():
    values = finite_bf16()
    values = values[(values.float().abs() > 2.0**-85) & (values.float().abs() < 2.0**127)]
    x = values[: len(values) // 16 * 16].reshape(-1, 16)
    g = quantize_tokens(x, RECIPE).global_scale
    assert count_incidents(x, g, RECIPE) == {"nonfinite": 0, "saturated": 0, "underflow_blocks": 0}


def test_the_largest_finite_values_stay_finite():
    x = torch.full((1, 16), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert dequantize(quantize_tokens(x, RECIPE)).isfinite().all()


def test_the_codes_of_a_token_do_not_depend_on_its_batch_mates():
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    x[5] *= 1000
    together = quantize_tokens(x, RECIPE)
    alone = quantize_tokens(x[2:3], RECIPE)
    assert torch.equal(together.codes[2:3], alone.codes)
    assert torch.equal(together.scales[2:3], alone.scales)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 48), (0,)])
def test_no_rows_give_no_rows(shape):
    q = quantize_tokens(torch.zeros(shape, dtype=torch.bfloat16), RECIPE)
    assert q.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert dequantize(q).shape == shape


def test_a_weight_tensor_takes_one_scale_an_expert():
    w = torch.randn(4, 6, 32) * torch.tensor([1.0, 10.0, 0.1, 0.0]).view(4, 1, 1)
    g = weight_global_scale(w, RECIPE)
    assert g.shape == (4,)
    assert g[3] == 1.0
    q = quantize(w, g.unsqueeze(1), RECIPE)
    for expert in range(4):
        assert torch.equal(q.codes[expert], quantize(w[expert], float(g[expert]), RECIPE).codes)


@pytest.mark.parametrize(
    ("x", "g", "field"),
    [
        (torch.zeros(2, 24), 1.0, "x"),
        (torch.tensor(1.0), 1.0, "x"),
        (torch.zeros(2, 32, dtype=torch.int32), 1.0, "x"),
        (torch.zeros(2, 32), torch.ones(3), "global_scale"),
        (torch.zeros(2, 32), 0.0, "global_scale"),
        (torch.zeros(2, 32), math.nan, "global_scale"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(x, g, field):
    with pytest.raises(ShapeError) as caught:
        quantize(x, g, RECIPE)
    assert caught.value.field == field
