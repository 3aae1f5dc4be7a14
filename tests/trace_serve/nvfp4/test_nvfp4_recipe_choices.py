import dataclasses

import numpy as np
import pytest
import recipe_oracle as oracle
import torch

from trace_serve.errors import RecipeError, ShapeError
from trace_serve.nvfp4 import (
    INCIDENT_NAMES,
    dequantize,
    matrix_global_scale,
    new_counters,
    quantize,
    quantize_tokens,
    quantize_weight,
    token_global_scale,
    unpack,
)
from trace_serve.recipe import PRESETS, SCALE_FORMULAS, Recipe

GB200 = PRESETS["gb200"]


def sample_rows(count: int = 60, k: int = 32) -> torch.Tensor:
    """BF16 rows with ties, zeros of both signs, zero blocks, and blocks that underflow beside large ones."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, k, generator=generator) * torch.logspace(-3, 3, count).unsqueeze(1)
    x[0] = 0
    x[1, :16] = -0.0
    x[2, :16] *= 2.0**-20
    x[3, :16] *= 2.0**-130
    x[4] = torch.tensor([6.0, 0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0] * (k // 8))
    x[5] = x[4] * 448
    return x.to(torch.bfloat16)


def expect_blocks(q, x, s, g, **choices):
    values = x.float().numpy()
    for row in range(x.shape[0]):
        for block in range(x.shape[1] // 16):
            part = slice(block * 16, block * 16 + 16)
            codes, byte = oracle.quantize_block(values[row, part], s=s[row], g=g[row], **choices)
            assert int(q.scales[row, block]) == byte, (row, block)
            assert unpack(q.codes)[row, part].tolist() == codes, (row, block)


def scales_of(x, recipe):
    scale = token_global_scale(x, recipe)
    encode = scale.decode.reciprocal() if scale.encode is None else scale.encode
    decode = scale.decode if scale.encode is None else encode.reciprocal()
    return encode.numpy(), decode.numpy()


@pytest.mark.parametrize("mode", ["pow2_per_token", "per_token"])
@pytest.mark.parametrize(
    "choices",
    [
        *({"formula": formula} for formula in SCALE_FORMULAS),
        {"ties": "up"},
        {"reciprocal": "divide"},
        {"zero_block": "one"},
        {"zero_block": "min_subnormal"},
        {"zero_block": "saturate"},
        {"four_over_six": True},
        {"four_over_six": True, "formula": "amax_over_six", "ties": "up", "zero_block": "min_subnormal"},
    ],
    ids=lambda choices: "-".join(f"{key}={value}" for key, value in choices.items()),
)
def test_each_choice_gives_the_codes_of_the_scalar_oracle(mode, choices):
    named = {("scale_formula" if key == "formula" else key): value for key, value in choices.items()}
    if "four_over_six" in named:
        named["four_over_six"] = "experts"
    recipe = Recipe(activation_global_scale=mode, **named)
    x = sample_rows()
    expect_blocks(quantize_tokens(x, recipe), x, *scales_of(x, recipe), **choices)


@pytest.mark.parametrize("maximum", [448.0, 256.0])
@pytest.mark.parametrize("mode", ["pow2_per_token", "per_token"])
def test_the_global_scale_leaves_block_scales_at_most_the_maximum(mode, maximum):
    recipe = Recipe(activation_global_scale=mode, four_over_six="experts", global_scale_max=maximum)
    x = sample_rows(k=64)[5:]
    amax = x.float().abs().amax(dim=1)
    ratio = amax / (6 * token_global_scale(x, recipe).decode)
    assert (ratio <= maximum * (1 + 1e-6)).all()
    assert (ratio > maximum / (2.001 if mode.startswith("pow2") else 1.001)).all()
    expect_blocks(quantize_tokens(x, recipe), x, *scales_of(x, recipe), four_over_six=True)


def test_four_over_six_is_never_worse_than_six_in_squared_error():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    plain, searched = Recipe(), Recipe(four_over_six="experts")
    errors = []
    for recipe in (plain, searched):
        kept = dequantize(quantize(x, 2.0**-8, recipe), torch.float32)
        errors.append((kept - x).reshape(200, 4, 16).square().sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < errors[0].sum()


def test_four_over_six_of_the_weights_leaves_activations_alone():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    recipe = Recipe(four_over_six="weights")
    assert torch.equal(quantize_tokens(x, recipe).scales, quantize_tokens(x, Recipe()).scales)
    assert not torch.equal(quantize_weight(x, recipe).scales, quantize_weight(x, Recipe()).scales)


def test_a_per_token_scale_is_the_inverse_of_the_rounded_quotient():
    x = sample_rows()[6:]
    scale = token_global_scale(x, GB200)
    amax = x.float().abs().amax(dim=1).numpy()
    expected = np.float32(2688) / amax
    assert np.array_equal(scale.encode.numpy(), expected)
    assert np.array_equal(scale.decode.numpy(), np.float32(1) / expected)
    assert torch.equal(quantize_tokens(x, GB200).global_scale, scale.decode)


def test_a_row_of_zeros_under_a_per_token_scale_gives_zeros_and_no_infinity():
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[1] = -0.0
    x[2, 3] = 1.0
    for recipe in (GB200, PRESETS["paper"], Recipe(activation_global_scale="per_token", zero_block="one")):
        q = quantize_tokens(x, recipe)
        assert q.global_scale.isfinite().all()
        assert dequantize(q, torch.float32).isfinite().all()
        assert dequantize(q)[:2].count_nonzero() == 0
        assert dequantize(q)[2, 3] == 1.0


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_value_that_is_not_finite_reads_back_as_nan_and_is_counted_under_every_preset(name):
    x = torch.randn(4, 48)
    x[1, 2] = float("inf")
    x[2, 20] = float("nan")
    counters = new_counters()
    q = quantize_tokens(x, PRESETS[name], counters=counters)
    assert dequantize(q).isnan().sum() == 32
    assert dict(zip(INCIDENT_NAMES, counters.tolist(), strict=True))["nonfinite"] == 2


def test_weights_of_the_gb200_preset_are_those_of_the_scalar_oracle():
    w = torch.randn(24, 32, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16) * 0.05
    q = quantize_weight(w, GB200)
    g = np.float32(np.abs(w.float().numpy()).max()) / np.float32(2688)
    assert q.global_scale.unique().tolist() == [float(g)]
    s = np.full(24, np.float32(1) / g)
    expect_blocks(q, w, s, np.float32(1) / s, formula="amax_over_six", four_over_six=True, zero_block=GB200.zero_block)


def test_square_tiles_share_the_scale_of_their_largest_value():
    recipe = Recipe(weight_tiles="16x16")
    w = torch.randn(32, 48, generator=torch.Generator().manual_seed(5))
    w[20, 17] = 50.0
    q = quantize_weight(w, recipe)
    tiles = q.scales.reshape(2, 16, 3)
    assert (tiles == tiles[:, :1]).all()
    g = float(matrix_global_scale(w, recipe).decode)
    for tile in range(2):
        for block in range(3):
            square = w[tile * 16 : tile * 16 + 16, block * 16 : block * 16 + 16].numpy()
            for row in range(16):
                codes, byte = oracle.quantize_block(
                    square[row], s=np.float32(1 / g), g=np.float32(g), amax=np.abs(square).max()
                )
                assert int(q.scales[tile * 16 + row, block]) == byte
                assert unpack(q.codes)[tile * 16 + row, block * 16 : block * 16 + 16].tolist() == codes


def test_square_tiles_need_rows_that_fill_them():
    with pytest.raises(ShapeError, match="multiple of 16 rows"):
        quantize_weight(torch.zeros(24, 32), Recipe(weight_tiles="16x16"))


def test_gate_and_up_share_a_scale_or_have_one_each():
    w = torch.randn(2, 32, 64)
    w[:, 16:] *= 100
    shared = quantize_weight(w, Recipe(), parts=2)
    split = quantize_weight(w, Recipe(gate_up_scale="split"), parts=2)
    assert (shared.global_scale[:, :16] == shared.global_scale[:, 16:]).all()
    assert (split.global_scale[:, :16] < split.global_scale[:, 16:]).all()
    for half in (slice(0, 16), slice(16, 32)):
        alone = quantize_weight(w[:, half], Recipe())
        assert torch.equal(split.codes[:, half], alone.codes)
        assert torch.equal(split.global_scale[:, half], alone.global_scale)


def test_static_scales_count_what_they_saturate():
    recipe = Recipe(
        activation_global_scale="per_tensor_static",
        experts_in_global_scale=(2.0**-6,),
        experts_mid_global_scale=(2.0**-6,),
    )
    x = torch.ones(2, 32)
    x[0, 5] = 168.0
    counters = new_counters()
    q = quantize_tokens(x, recipe, static_scale=recipe.experts_in_scale(0), counters=counters)
    assert dequantize(q)[0, 5] == 42.0
    assert counters.tolist() == [0, 1, 0]


def test_a_static_scale_is_neither_guessed_nor_ignored():
    static = Recipe(
        activation_global_scale="per_tensor_static", experts_in_global_scale=(1.0,), experts_mid_global_scale=(1.0,)
    )
    with pytest.raises(RecipeError) as caught:
        quantize_tokens(torch.zeros(1, 16), static)
    assert caught.value.field == "activation_global_scale"
    with pytest.raises(RecipeError, match="leave static_scale out"):
        quantize_tokens(torch.zeros(1, 16), Recipe(), static_scale=1.0)


def test_only_the_operand_that_a_formula_is_named_for_uses_it():
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    scale = token_global_scale(x, PRESETS["paper"])
    for field, operand in [
        ("scale_formula", "activations"),
        ("weight_scale_formula", "weights"),
        ("kv_scale_formula", "kv"),
    ]:
        recipe = dataclasses.replace(Recipe(), **{field: "amax_over_six"})
        for candidate in ("activations", "weights", "kv"):
            named = quantize(x, scale.decode, recipe, operand=candidate, encode_scale=scale.encode)
            default = quantize(x, scale.decode, Recipe(), operand=candidate, encode_scale=scale.encode)
            assert torch.equal(named.scales, default.scales) is (candidate != operand)
