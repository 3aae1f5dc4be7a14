"""What is counted at a site, and the second pass of QUADS."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.replay import HintedRounding
from trace_serve.hints.rows import HintFile, Site
from trace_serve.mismatch.quads import QuadsRounding
from trace_serve.mismatch.sites import MeasuredRounding, shares
from trace_serve.nvfp4 import fake_quantize_tokens, hint_bits, pack, quantize_tokens, unpack
from trace_serve.recipe import Recipe

RECIPE = Recipe()


class _Known(HintedRounding):
    """Hints with whole codes."""

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__(RECIPE, [None])
        self._known = outcomes

    def outcomes(
        self, site: str, layer: int, x: Tensor, rows: Tensor | None = None, places: Tensor | None = None
    ) -> Outcomes:
        return self._known


def measured(x: Tensor, outcomes: Outcomes) -> MeasuredRounding:
    rounding = MeasuredRounding(HintedRounding(RECIPE, [None]), _Known(outcomes), RECIPE)
    rounding.begin(0, x.shape[0])
    assert torch.equal(rounding.experts_in(3, x), fake_quantize_tokens(x, RECIPE))
    return rounding


def of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale bytes and global scales."""
    kept = quantize_tokens(x, RECIPE)
    return unpack(kept.codes), kept.scales.clone(), kept.global_scale.clone()


def outcomes(codes: Tensor, scales: Tensor, global_scale: Tensor, present: Tensor | None = None) -> Outcomes:
    return Outcomes(hint_bits(pack(codes)), scales, "byte", global_scale, present, codes)


def test_codes_and_scales_that_are_the_own_do_not_differ() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = shares([measured(x, outcomes(*of(x)))])["experts_in"].total
    assert (found.bits, found.codes, found.one_step, found.scales, found.scale_step) == (0, 0, None, 0, None)


def test_each_difference_is_counted_for_what_it_is() -> None:
    x = torch.tensor([[6.0, 1.0, 0.0, -2.0] * 4, [6.0] * 16]).bfloat16()
    codes, scales, global_scale = of(x)
    codes[0, 1] += 1  # one step away: another lowest bit
    codes[0, 3] += 2  # two steps away: the same lowest bit
    codes[0, 2] = 8  # -0 for 0
    scales[1, 0] -= 1
    rounding = measured(x, outcomes(codes, scales, global_scale))
    found = shares([rounding, rounding])["experts_in"]
    assert list(found.layers) == [3]
    assert found.total == found.layers[3]
    assert found.total.bits == 1 / 32
    assert found.total.codes == 2 / 32
    assert found.total.one_step == 1 / 2
    assert found.total.scales == 1 / 2
    assert found.total.scale_step == 1


def test_a_neighbour_across_zero_is_one_step_away() -> None:
    x = torch.tensor([[6.0, 0.5] + [0.0] * 14]).bfloat16()
    codes, scales, global_scale = of(x)
    codes[0, 2] = 9  # -0.5 where the own is 0
    assert shares([measured(x, outcomes(codes, scales, global_scale))])["experts_in"].total.one_step == 1


def test_rows_without_hints_are_not_counted() -> None:
    x = torch.tensor([[6.0] * 16, [6.0] * 16]).bfloat16()
    codes, scales, global_scale = of(x)
    codes[1] = 0
    found = shares([measured(x, outcomes(codes, scales, global_scale, torch.tensor([True, False])))])
    assert found["experts_in"].total.codes == 0


def test_a_scale_is_the_block_scale_times_the_global_one() -> None:
    x = torch.tensor([[6.0] * 16]).bfloat16()
    codes, scales, global_scale = of(x)
    # Twice the global scale and half the block scale: eight steps of the byte.
    same = shares([measured(x, outcomes(codes, scales - 8, global_scale * 2))])["experts_in"].total
    assert (same.scales, same.scale_step) == (0, None)


def test_bits_of_hint_files_alone_say_nothing_about_codes() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    kept = quantize_tokens(x, RECIPE)
    site = Site(
        name="experts_in",
        layers=(0,),
        bits=hint_bits(kept.codes).numpy()[:, None],
        scales=kept.scales.numpy()[:, None],
        present=np.ones(4, dtype=np.bool_),
        global_log2=torch.log2(kept.global_scale).to(torch.int8).numpy()[:, None, None],
    )
    hints = HintFile(np.zeros(4, dtype=np.int32), (site,), RECIPE.recipe_id, "", ((0, 4, ""),))
    every = HintedRounding(RECIPE, [hints])
    rounding = MeasuredRounding(HintedRounding(RECIPE, [hints], layers=[]), every, RECIPE)
    rounding.begin(0, 4)
    rounding.experts_in(0, -x)
    rounding.experts_in(1, x)
    found = shares([rounding])["experts_in"]
    assert list(found.layers) == [0]
    # The sign is not in the lowest bit.
    assert (found.total.bits, found.total.codes, found.total.scales) == (0, None, 0)


def test_the_second_pass_mends_the_worse_half_of_the_channels_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 64, generator=generator)
    x[:, :32] *= 0.01
    x[:, 32:] = x[:, 32:].round()
    # Every block is scaled by its largest value, so where values spread little less is lost.
    x = x.bfloat16()
    rounding = QuadsRounding(RECIPE)
    first = rounding.experts_in(0, x)
    assert torch.equal(first, fake_quantize_tokens(x, RECIPE))
    rounding.choose()
    second = rounding.experts_in(0, x)
    lost, left = ((x.float() - kept.float()).square().mean(dim=0) for kept in (first, second))
    mended = (second.float() != first.float()).any(dim=0)
    assert int(mended.sum()) == 32
    assert lost[mended].min() >= lost[~mended].max()
    assert (left[mended] < 0.1 * lost[mended]).all()
    assert torch.equal(left[~mended], lost[~mended])


def test_each_layer_has_channels_of_its_own() -> None:
    generator = torch.Generator().manual_seed(3)
    rounding = QuadsRounding(RECIPE)
    batches = [torch.randn(32, 64, generator=generator).bfloat16() for _ in range(2)]
    for layer, x in enumerate(batches):
        rounding.experts_in(layer, x)
        rounding.experts_mid(layer, x * 3, torch.arange(32), torch.zeros(32, dtype=torch.int64))
    rounding.choose()
    changed = [
        (rounding.experts_in(layer, x) != fake_quantize_tokens(x, RECIPE)).any(dim=0) for layer, x in enumerate(batches)
    ]
    assert [int(each.sum()) for each in changed] == [32, 32]
    assert not torch.equal(*changed)


def test_a_width_below_two_blocks_has_no_second_pass() -> None:
    x = torch.randn(4, 16).bfloat16()
    rounding = QuadsRounding(RECIPE)
    rounding.experts_in(0, x)
    rounding.choose()
    assert torch.equal(rounding.experts_in(0, x).to(x.dtype), fake_quantize_tokens(x, RECIPE))


@pytest.mark.parametrize("layer", [0, 7])
def test_a_layer_that_the_prompts_never_reached_is_rounded_once(layer: int) -> None:
    x = torch.randn(4, 64).bfloat16()
    rounding = QuadsRounding(RECIPE)
    rounding.choose()
    assert torch.equal(rounding.experts_in(layer, x), fake_quantize_tokens(x, RECIPE))
