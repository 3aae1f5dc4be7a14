"""Fake quantization that follows a rollout: never worse than nearest where it can know, and equal where they agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trace_serve.errors import ConfigError, ShapeError
from trace_serve.guided.outcomes import Outcomes, ScaleKind, unpack_bits
from trace_serve.guided.quantize import Mode, guided_fake_quantize, guided_quantize
from trace_serve.nvfp4 import dequantize, e2m1, e4m3, hint_bits, quantize, quantize_tokens, unpack
from trace_serve.nvfp4.quantize import Quantized
from trace_serve.recipe import PRESETS, Recipe

RECIPE = Recipe()
WITHOUT_SEARCH = {name: recipe for name, recipe in PRESETS.items() if recipe.four_over_six == "off"}


def values(seed: int, rows: int = 64, columns: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp(2 * torch.randn(rows, 1, generator=generator))).to(torch.bfloat16)


def outcomes_of(kept: Quantized, scale_kind: ScaleKind = "lsb", *, codes: bool = False) -> Outcomes:
    scales = {"lsb": kept.scales & 1, "byte": kept.scales, "none": None}[scale_kind]
    return Outcomes(
        bits=hint_bits(kept.codes),
        scales=scales,
        scale_kind=scale_kind,
        global_scale=kept.global_scale,
        codes=unpack(kept.codes) if codes else None,
    )


def same(a: Quantized, b: Quantized) -> bool:
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(a.scales, b.scales)
        and torch.equal(a.global_scale, b.global_scale)
    )


def quantized(x: Tensor, recipe: Recipe) -> tuple[Quantized, float | None]:
    """As the engine quantizes activations, with the static scale where the recipe has one."""
    static = 0.01 if recipe.activation_global_scale == "per_tensor_static" else None
    return quantize_tokens(x, recipe, static_scale=static), static


@pytest.mark.parametrize("scale_kind", ["lsb", "byte", "none"])
@pytest.mark.parametrize("tau", [0.5, 0.25])
@pytest.mark.parametrize("name", sorted(WITHOUT_SEARCH))
def test_hints_that_equal_the_own_codes_give_bitwise_nearest(name: str, tau: float, scale_kind: ScaleKind) -> None:
    recipe = WITHOUT_SEARCH[name]
    x = values(0)
    x[3] = 0
    x[4, :16] = 0
    x[5] *= 1e-30
    x[6, 7] = -0.0
    nearest, static = quantized(x, recipe)
    guided = guided_quantize(x, outcomes_of(nearest, scale_kind), recipe, global_scale=static, tau=tau)
    assert same(guided, nearest)
    value = guided_fake_quantize(x, outcomes_of(nearest, scale_kind), recipe, global_scale=static, tau=tau)
    assert torch.equal(value, dequantize(nearest, x.dtype))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale_kind", ["lsb", "byte"])
def test_a_trainer_that_differs_by_rounding_alone_gets_the_rollouts_values(seed: int, scale_kind: ScaleKind) -> None:
    rollout = values(seed)
    noise = 1 + 0.004 * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(seed + 100))
    trainer = (rollout.float() * noise).to(torch.bfloat16)
    kept, own = quantize_tokens(rollout, RECIPE), quantize_tokens(trainer, RECIPE)
    guided = guided_quantize(trainer, outcomes_of(kept, scale_kind), RECIPE)
    differs = unpack(own.codes) != unpack(kept.codes)
    still = unpack(guided.codes) != unpack(kept.codes)
    assert differs.sum() > 100
    assert still.sum() * 200 < differs.sum()
    assert (guided.scales != kept.scales).sum() * 100 <= (own.scales != kept.scales).sum()


def test_no_value_inside_the_guarantee_is_worse_than_nearest_over_millions_of_pairs() -> None:
    generator = torch.Generator().manual_seed(7)
    u = (torch.rand(1 << 21, generator=generator) - 0.5) * 15
    v = u + torch.randn(1 << 21, generator=generator) * 0.3
    grid = torch.tensor(e2m1.MAGNITUDES)
    blocks = u.reshape(-1, 16)
    codes = e2m1.encode(v)
    bits = (codes & 1).reshape(-1, 16).to(torch.int32)
    packed = (bits << torch.arange(16, dtype=torch.int32)).sum(dim=-1, dtype=torch.int32).unsqueeze(-1)
    one = torch.full((blocks.shape[0], 1), e4m3.ONE_BYTE, dtype=torch.uint8)
    outcomes = Outcomes(packed, one, "byte", global_scale=torch.ones(blocks.shape[0]))
    n = (e2m1.encode(u) & 7).long()
    a = u.abs()
    above = a > grid[n]
    lower = torch.where(n > 0, (grid[n] + grid[(n - 1).clamp(min=0)]) / 2, -a)
    upper = torch.where(n < 7, (grid[n] + grid[(n + 1).clamp(max=7)]) / 2, torch.full_like(a, torch.inf))
    # At code 0 the cell reaches to the mirrored boundary on the other side of zero.
    lower = torch.where(n == 0, -upper, lower)
    far = torch.where(above, a - lower, upper - a)
    inside = (u - v).abs() < far
    saturated = (n == 7) & (a >= 6)
    for tau in (0.5, 0.25):
        kept = guided_quantize(blocks, outcomes, RECIPE, tau=tau)
        guided = e2m1.decode(unpack(kept.codes)).reshape(-1)
        nearest, rollout = e2m1.decode(e2m1.encode(u)), e2m1.decode(codes)
        worse = (guided - rollout).abs() > (nearest - rollout).abs()
        assert not (worse & inside & (a != grid[n])).any()
        assert not (worse & saturated & (u * v > 0)).any()


@pytest.mark.parametrize(
    ("trainer", "rollout", "at_half", "at_quarter"),
    [(0.99, 1.26, 0.5, 1.0), (0.02, -0.26, 0.5, 0.0), (3.9, 5.01, 3.0, 4.0), (2.05, 1.74, 3.0, 2.0)],
)
def test_the_pairs_that_one_bit_misleads_are_repaired_by_the_guard(
    trainer: float, rollout: float, at_half: float, at_quarter: float
) -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = trainer, 6.0
    code = e2m1.encode(torch.tensor(rollout))
    bits = torch.tensor([[int(code & 1) | 2]], dtype=torch.int32)
    outcomes = Outcomes(bits, torch.tensor([[e4m3.ONE_BYTE]], dtype=torch.uint8), "byte", torch.ones(1))
    for tau, expected in ((0.5, at_half), (0.25, at_quarter)):
        assert guided_fake_quantize(x, outcomes, RECIPE, tau=tau)[0, 0].item() == expected


def test_rows_without_outcomes_are_rounded_to_nearest() -> None:
    x, other = values(1), values(2)
    kept, own = quantize_tokens(other, RECIPE), quantize_tokens(x, RECIPE)
    present = torch.arange(64) % 2 == 0
    guided = guided_quantize(x, replace(outcomes_of(kept), present=present), RECIPE)
    assert same(Quantized(guided.codes[~present], guided.scales[~present], guided.global_scale[~present]),
                Quantized(own.codes[~present], own.scales[~present], own.global_scale[~present]))  # fmt: skip
    assert not torch.equal(guided.codes[present], own.codes[present])


def test_a_replay_gives_the_rollouts_values_whatever_the_trainer_has() -> None:
    kept = quantize_tokens(values(3), RECIPE)
    replayed = guided_quantize(values(4), outcomes_of(kept, "byte", codes=True), RECIPE, mode="replay")
    assert same(replayed, kept)
    with pytest.raises(ConfigError, match="replay"):
        guided_quantize(values(4), outcomes_of(kept), RECIPE, mode="replay")


@pytest.mark.parametrize("mode", ["nearest", "guided", "replay"])
def test_the_gradient_passes_unchanged(mode: Mode) -> None:
    x = values(5).float().requires_grad_()
    kept = quantize_tokens(values(6), RECIPE)
    upstream = torch.randn(x.shape)
    out = guided_fake_quantize(x, outcomes_of(kept, "byte", codes=True), RECIPE, mode=mode)
    out.backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_a_block_that_the_rollout_made_zero_becomes_zero() -> None:
    x = values(8)
    kept = quantize_tokens(torch.zeros_like(x), RECIPE)
    outcomes = outcomes_of(kept, "byte")
    assert not guided_fake_quantize(x, outcomes, RECIPE).any()


def test_values_that_are_not_finite_read_back_as_nan_in_their_block_alone() -> None:
    x = values(9)
    kept = quantize_tokens(x, RECIPE)
    x[0, 3] = torch.inf
    out = guided_fake_quantize(x, outcomes_of(kept), RECIPE)
    assert out[0, :16].isnan().all()
    assert out[0, 16:].isfinite().all()
    assert out[1:].isfinite().all()


def test_static_scales_of_keys_are_the_recipes() -> None:
    x = values(10)
    kept = quantize(x, 0.25, RECIPE, operand="kv")
    outcomes = replace(outcomes_of(kept), global_scale=None)
    assert same(
        guided_quantize(x, outcomes, RECIPE, operand="kv", global_scale=0.25),
        Quantized(kept.codes, kept.scales, kept.global_scale.expand(64)),
    )


def test_lowest_bits_cannot_tell_which_scale_4over6_chose() -> None:
    recipe = Recipe(four_over_six="experts")
    kept = quantize_tokens(values(11), recipe)
    with pytest.raises(ConfigError, match="4over6"):
        guided_quantize(values(11), outcomes_of(kept), recipe)
    assert same(guided_quantize(values(11), outcomes_of(kept, "byte"), recipe), kept)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": torch.zeros(64, 15, dtype=torch.int32)},
        {"bits": torch.zeros(64, 16, dtype=torch.float32)},
        {"scales": None},
        {"scales": torch.zeros(64, 16)},
        {"present": torch.zeros(63, dtype=torch.bool)},
        {"codes": torch.zeros(64, 255, dtype=torch.uint8)},
    ],
)
def test_outcomes_of_another_tensor_are_refused(change: dict[str, Any]) -> None:
    kept = quantize_tokens(values(12), RECIPE)
    with pytest.raises(ShapeError) as caught:
        guided_quantize(values(12), replace(outcomes_of(kept), **change), RECIPE)
    assert caught.value.field == next(iter(change))


def test_bits_unpack_lowest_first() -> None:
    bits = torch.tensor([[0b1000000000000001, 2]], dtype=torch.int32)
    assert unpack_bits(bits).nonzero()[:, 1].tolist() == [0, 15, 17]
    assert torch.equal(unpack_bits(bits.to(torch.uint16)), unpack_bits(bits))
