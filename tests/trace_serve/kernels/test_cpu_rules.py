"""The CPU kernels under every recipe that they implement equal the reference bit for bit."""

import pytest
import torch
from rule_sets import EVERY, NAMED, PAPER_WEIGHTS, awkward_rows, by_name

from trace_serve import nvfp4
from trace_serve.errors import RecipeError, ShapeError
from trace_serve.kernels import get_kernels
from trace_serve.recipe import Recipe

CPU, REFERENCE = get_kernels("cpu"), get_kernels("reference")


def check(x, rules, **options):
    counted, expected_counts = nvfp4.new_counters(), nvfp4.new_counters()
    values, got = CPU.fake_quantize_rows(x, rules=rules, hints=True, counters=counted, **options)
    kept, expected = REFERENCE.fake_quantize_rows(x, rules=rules, hints=True, counters=expected_counts, **options)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.global_scale, expected.global_scale)
    assert torch.equal(got.hints.view(torch.int16), expected.hints.view(torch.int16))
    assert torch.equal(values.isnan(), kept.isnan())
    assert torch.equal(values.nan_to_num().view(torch.int16), kept.nan_to_num().view(torch.int16))
    assert counted.tolist() == expected_counts.tolist()


@by_name
@pytest.mark.parametrize("k", [16, 704, 2880, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_awkward_rows_under_each_recipe(rules, k, dtype):
    x = awkward_rows(k).to(dtype)
    check(x, rules)
    check(x, rules, rotation=16)
    check(x, rules, global_scale=0.037)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_awkward_rows_under_every_combination_of_choices(dtype):
    x = awkward_rows(64).to(dtype)
    for rules in EVERY:
        check(x, rules)
        check(x, rules, global_scale=2.0**-9)


@by_name
def test_every_bf16_pattern_under_each_recipe(rules):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check(patterns.view(-1, 64), rules)
    rows = torch.full((65536, 16), 300.0, dtype=torch.bfloat16)
    rows[:, 7] = patterns
    check(rows, rules)
    check(rows, rules, global_scale=0.3)


@pytest.mark.parametrize("global_scale", [2.0**-100, 2.0**-118, 2.0**117, 1e-38])
def test_values_under_global_scales_at_the_ends_of_fp32(global_scale):
    check(awkward_rows(64) * 0.01, NAMED["256"], global_scale=global_scale)


def test_a_scale_whose_arithmetic_starts_from_its_reciprocal():
    x = awkward_rows(256)
    for amax in (0.051, 3.7e-4, 900.0):
        g = torch.tensor(amax) / torch.tensor(2688.0)
        check(x, PAPER_WEIGHTS, global_scale=float(g), encode_scale=float(g.reciprocal()))


def test_short_rows_that_fill_strips_unevenly():
    x = awkward_rows(80).repeat(70, 1)[:-3]
    for rules in NAMED.values():
        check(x, rules)
        check(x, rules, global_scale=0.5)


def test_rules_and_counters_that_do_not_fit_are_refused():
    x = torch.zeros(16, 16)
    for recipe, field in (
        (Recipe(four_over_six="weights"), "four_over_six"),
        (Recipe(weight_tiles="16x16"), "weight_tiles"),
    ):
        with pytest.raises(RecipeError) as caught:
            CPU.quantize_rows(x, rules=nvfp4.rules(recipe, "weights"))
        assert caught.value.field == field
    for counters in (torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)[::2]):
        with pytest.raises(ShapeError) as caught:
            CPU.quantize_rows(x, counters=counters)
        assert caught.value.field == "counters"
