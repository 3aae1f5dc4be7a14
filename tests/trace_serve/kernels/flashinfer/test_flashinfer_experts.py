"""What surrounds the library's products: every pair gets its expert, padding never leaks, and the outcome at the second
product's input is the recipe's, in the order of the pairs. The products themselves are `library_stages` here."""

from dataclasses import replace

import pytest
import torch
from expert_layer import Layer, expected, layer, middle_rows
from flashinfer_library import load
from library_stages import STAGES

from trace_serve import nvfp4
from trace_serve.errors import ConfigError, EngineError, RecipeError, ShapeError
from trace_serve.kernels.flashinfer import FusedExperts, StagedExperts, experts_for, prepare_weights
from trace_serve.kernels.flashinfer.experts import LIBRARY_CHOICES, fused_fits
from trace_serve.kernels.flashinfer.weights import ExpertWeights
from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import PRESETS, Recipe

STATIC = Recipe(
    activation_global_scale="per_tensor_static", experts_in_global_scale=(0.25,), experts_mid_global_scale=(0.5,)
)
RECIPES = {
    "portable": Recipe(),
    "gb200": PRESETS["gb200"],
    "rotated": Recipe(expert_rotation=32),
    "static": STATIC,
    "searched": Recipe(four_over_six="experts", global_scale_max=256),
}


@pytest.fixture(scope="module", autouse=True)
def flashinfer():
    return load("flashinfer")


def run(a: Layer, weights: ExpertWeights | None = None, **options):
    weights = prepare_weights(a.w13, a.w2) if weights is None else weights
    place = {name: options.pop(name) for name in ("experts", "first_expert") if name in options}
    runner = StagedExperts(weights, a.kernels, stages=STAGES, **place)
    return runner(a.x, a.topk_ids, a.topk_weights, mid_static_scale=a.mid_static_scale, **options)


def assert_same(mid: Quantized, want: Quantized) -> None:
    assert torch.equal(mid.codes, want.codes)
    assert torch.equal(mid.scales, want.scales)
    assert torch.equal(mid.global_scale, want.global_scale)
    assert torch.equal(mid.hints, want.hints)


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_equals_each_pair_alone_and_its_middle_outcome_is_the_recipes(name):
    a = layer(RECIPES[name])
    out, mid = run(a, hints=True)
    want, want_mid = expected(a)
    assert_same(mid.quantized, want_mid)
    assert mid.present.all()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want.to(torch.bfloat16))


@pytest.mark.parametrize(("hidden", "intermediate"), [(192, 352), (2880, 64), (320, 704)])
def test_padded_sizes_give_what_the_unpadded_ones_do(hidden, intermediate):
    a = layer(Recipe(), experts=2, hidden=hidden, intermediate=intermediate, tokens=3)
    out, mid = run(a, hints=True)
    want, want_mid = expected(a)
    assert_same(mid.quantized, want_mid)
    assert torch.equal(out, want.to(torch.bfloat16))


def test_an_expert_with_more_pairs_than_a_tile_and_experts_with_none():
    a = layer(Recipe(), experts=5, tokens=140, top_k=1)
    a.topk_ids[:] = 3
    a.topk_ids[7] = 1
    out, mid = run(a, hints=True)
    want, want_mid = expected(a)
    assert_same(mid.quantized, want_mid)
    assert torch.equal(out, want.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["portable", "gb200", "static"])
def test_a_batch_of_no_tokens_gives_no_rows(name):
    a = layer(RECIPES[name], tokens=0)
    out, mid = run(a, hints=True)
    assert (tuple(out.shape), out.dtype) == ((0, 128), torch.bfloat16)
    assert tuple(mid.quantized.codes.shape) == (0, 64)
    assert tuple(mid.quantized.hints.shape) == (0, 8)
    assert tuple(mid.present.shape) == (0,)


def test_experts_of_two_ranks_sum_to_all_and_rows_of_the_other_rank_are_marked_missing():
    a = layer(Recipe(), experts=4)
    whole, all_mid = run(a, hints=True)
    total, seen = torch.zeros_like(whole, dtype=torch.float32), torch.zeros(18, dtype=torch.bool)
    for first in (0, 2):
        part = [Quantized(*(t[first : first + 2] for t in (w.codes, w.scales, w.global_scale))) for w in (a.w13, a.w2)]
        out, mid = run(a, prepare_weights(*part), experts=4, first_expert=first, hints=True)
        here = (a.topk_ids.flatten() >= first) & (a.topk_ids.flatten() < first + 2)
        assert torch.equal(mid.present, here)
        assert torch.equal(mid.quantized.codes[here], all_mid.quantized.codes[here])
        assert not mid.quantized.codes[~here].any()
        total += out.float()
        seen |= here
    assert seen.all()
    # Each rank's part is rounded to BF16 before the sum.
    assert (total - whole.float()).norm() < 2**-8 * whole.float().norm()


def test_only_rows_of_pairs_are_counted_as_incidents():
    a = layer(STATIC)
    rows = middle_rows(a)
    want, got = nvfp4.new_counters(), nvfp4.new_counters()
    a.kernels.quantize_activations(rows, static_scale=a.mid_static_scale, counters=want)
    run(a, counters=got)
    assert torch.equal(got, want)


def test_a_token_that_is_not_finite_is_counted_and_spoils_no_other():
    a = layer(Recipe())
    clean, _ = run(a)
    a.x.scales[4] = 0x7F
    counters = nvfp4.new_counters()
    out, _ = run(a, counters=counters)
    others = torch.arange(9) != 4
    assert counters[0] == 2 * 128
    assert out[4].isnan().all()
    assert torch.equal(out[others], clean[others])


def test_the_order_of_experts_within_a_token_is_the_order_of_the_sum():
    a = layer(Recipe(), top_k=4)
    first, _ = run(a)
    assert torch.equal(first, expected(a)[0].to(torch.bfloat16))


# FlashInfer's own reference of the whole layer, which does not quantize between the products.


def test_flashinfers_reference_of_the_layer_agrees_but_for_the_middle_quantization_under_gb200():
    reference = load("flashinfer.trace.templates.moe")._cute_dsl_fused_moe_reference
    a = layer(PRESETS["gb200"], hidden=256, intermediate=256, tokens=24)
    flip = [torch.cat(t.chunk(2, dim=1)[::-1], dim=1) for t in (a.w13.codes, a.w13.scales)]
    ones = torch.ones(1)

    def theirs(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return reference(
            a.x.codes,
            a.x.scales.view(torch.float8_e4m3fn),
            a.topk_ids,
            a.topk_weights,
            codes,
            scales.view(torch.float8_e4m3fn),
            a.w13.global_scale,
            ones,
            a.w2.codes,
            a.w2.scales.view(torch.float8_e4m3fn),
            a.w2.global_scale,
            4,
            2,
            per_token_scale=a.x.global_scale,
        ).float()

    out, _ = run(a)
    want = theirs(*flip)
    # Rounding to E2M1 with 16 values a scale costs about 10% of a random row's length.
    assert ((out - want).norm() / want.norm()) < 0.15
    # It tells up from gate: with the halves as we store them it computes something else.
    other = theirs(a.w13.codes, a.w13.scales)
    assert ((out - other).norm() / other.norm()) > 0.5


def test_flashinfers_reference_is_equal_once_the_middle_is_left_in_bf16():
    reference = load("flashinfer.trace.templates.moe")._cute_dsl_fused_moe_reference
    a = layer(PRESETS["gb200"], tokens=6, top_k=1)
    # Code 2 is 1.0, and so is scale byte 0x38: a second matrix that changes nothing.
    identity = nvfp4.pack(2 * torch.eye(128, dtype=torch.uint8).expand(4, 128, 128))
    ones = torch.full((4, 128, 8), 0x38, dtype=torch.uint8)
    flip = [torch.cat(t.chunk(2, dim=1)[::-1], dim=1) for t in (a.w13.codes, a.w13.scales)]
    out = reference(
        a.x.codes,
        a.x.scales.view(torch.float8_e4m3fn),
        a.topk_ids,
        torch.ones(6, 1),
        flip[0],
        flip[1].view(torch.float8_e4m3fn),
        a.w13.global_scale,
        torch.ones(1),
        identity,
        ones.view(torch.float8_e4m3fn),
        torch.ones(4),
        4,
        1,
        per_token_scale=a.x.global_scale,
    )
    # Their SiLU is in another precision: one BF16 step apart at most.
    assert torch.allclose(out.float(), middle_rows(a).float(), rtol=2**-7, atol=1e-5)


# Runners and refusals.


def test_the_single_call_runner_has_no_outcome_at_experts_mid_and_says_so(monkeypatch):
    monkeypatch.setattr("trace_serve.kernels.flashinfer.environment.exact_math_problem", lambda: "")
    a = layer(PRESETS["gb200"])
    runner = FusedExperts(prepare_weights(a.w13, a.w2), a.kernels)
    assert "experts_mid" not in runner.sites
    with pytest.raises(EngineError, match=r"experts_mid: not available with runner 'cute_dsl_fused'.*_staged"):
        runner(a.x, a.topk_ids, a.topk_weights, want_mid=True)
    assert runner._mid_factor.item() == torch.tensor(1 / 2688).item()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_global_scale", "pow2_per_token"),
        ("scale_formula", "amax_over_six"),
        ("ties", "up"),
        ("zero_block", "zero"),
        ("four_over_six", "experts"),
        ("expert_rotation", 16),
    ],
)
def test_the_single_call_runner_refuses_by_name_what_the_library_does_not_compute(field, value):
    recipe = replace(PRESETS["gb200"], **{field: value})
    assert fused_fits(PRESETS["gb200"])
    assert not fused_fits(recipe)
    a = layer(PRESETS["gb200"])
    a.kernels.recipe = recipe
    with pytest.raises(RecipeError, match=rf"recipe {field}: .*choose runner 'cute_dsl_staged'") as caught:
        FusedExperts(prepare_weights(a.w13, a.w2), a.kernels)
    assert caught.value.field == field


def test_every_choice_of_the_librarys_quantizer_is_a_field_of_the_recipe_and_gb200_has_it():
    fields = PRESETS["gb200"].to_dict()
    assert all(fields[name] in wanted for name, wanted in LIBRARY_CHOICES.items())


def test_the_librarys_factor_for_a_token_is_ours():
    utilities = load("flashinfer.quantization.nvfp4_quantization_utils")
    assert utilities.nvfp4_per_token_scale_inv(None) == 1 / 2688


def test_activations_in_bf16_are_refused():
    a = layer(Recipe())
    a.kernels.recipe = Recipe(experts="w4a16")
    with pytest.raises(RecipeError, match="w4a16"):
        StagedExperts(prepare_weights(a.w13, a.w2), a.kernels)


def test_a_device_that_cannot_run_it_is_refused_with_the_reason():
    a = layer(Recipe())
    weights = prepare_weights(a.w13, a.w2)
    with pytest.raises(ConfigError, match="'flashinfer' cannot run on cpu: runs on cuda, not on cpu"):
        experts_for(weights, a.kernels)
    with pytest.raises(ConfigError, match="runner: got 'trtllm', expected auto or one of cute_dsl_staged"):
        experts_for(weights, a.kernels, runner="trtllm")


@pytest.mark.parametrize("first", [-1, 1])
def test_experts_outside_the_layer_are_refused(first):
    a = layer(Recipe())
    with pytest.raises(ShapeError, match="first_expert"):
        StagedExperts(prepare_weights(a.w13, a.w2), a.kernels, first_expert=first)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda a: replace(a, x=replace(a.x, codes=a.x.codes[:, :-8]))),
        ("x", lambda a: replace(a, x=replace(a.x, global_scale=a.x.global_scale.double()))),
        ("x", lambda a: replace(a, x=replace(a.x, scales=a.x.scales[:-1]))),
        ("topk_ids", lambda a: replace(a, topk_ids=a.topk_ids.float())),
        ("topk_ids", lambda a: replace(a, topk_ids=a.topk_ids[:-1])),
        ("topk_weights", lambda a: replace(a, topk_weights=a.topk_weights[:, :1])),
        ("topk_weights", lambda a: replace(a, topk_weights=a.topk_weights.double())),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(name, change):
    with pytest.raises(ShapeError) as caught:
        run(change(layer(Recipe())), prepare_weights(layer(Recipe()).w13, layer(Recipe()).w2))
    assert caught.value.field == name
