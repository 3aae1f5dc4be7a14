"""Rows rounded as a rollout did: the kernel equals `guided.quantize` in torch on the CPU, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import bits_to_bf16, seeded
from rule_sets import awkward_rows

from trace_serve import nvfp4
from trace_serve.guided.fused import fused
from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.quantize import guided_quantize
from trace_serve.kernels.triton.follow import follow_rows
from trace_serve.recipe import PRESETS, Recipe

RECIPE = Recipe()
RECIPES = {
    name: recipe for name, recipe in PRESETS.items() if recipe.experts == "w4a4" and recipe.four_over_six == "off"
} | {
    "divide, ties up": Recipe(reciprocal="divide", ties="up"),
    "zero block one": Recipe(zero_block="one"),
    "zero block min_subnormal": Recipe(zero_block="min_subnormal"),
    "zero block saturate": Recipe(zero_block="saturate"),
    "scale a token in fp32": Recipe(activation_global_scale="per_token"),
}
KINDS = ("lsb", "byte", "none")


def outcomes_of(rollout: torch.Tensor, recipe: Recipe, kind: str, *, static: float | None = None) -> Outcomes:
    """What a rollout with these values tells, with a few rows missing."""
    kept = nvfp4.quantize_tokens(rollout, recipe) if static is None else nvfp4.quantize(rollout, static, recipe)
    scales = {"lsb": kept.scales & 1, "byte": kept.scales, "none": None}[kind]
    present = torch.arange(rollout.shape[0]) % 5 != 3
    scale = kept.global_scale.expand(rollout.shape[0]).contiguous()
    return Outcomes(nvfp4.hint_bits(kept.codes), scales, kind, scale, present)


class FollowCases:
    device: str

    def check(self, x, outcomes, recipe=RECIPE, *, tau=0.5, operand="activations", global_scale=None):
        """Compares codes, scales and values; returns the codes, unpacked."""
        expected = guided_quantize(x, outcomes, recipe, tau=tau, operand=operand, global_scale=global_scale)

        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(outcomes).items()
        }
        got = fused(
            x.to(self.device),
            Outcomes(**moved),
            recipe,
            operand=operand,
            global_scale=global_scale,
            tau=tau,
            values=True,
        )
        assert torch.equal(got.quantized.scales.cpu(), expected.scales)
        assert torch.equal(got.quantized.global_scale.cpu(), expected.global_scale)
        readable = nvfp4.dequantize(expected, torch.float32)
        codes, expected_codes = nvfp4.unpack(got.quantized.codes.cpu()), nvfp4.unpack(expected.codes)
        # Under a scale that is NaN codes mean nothing.
        assert torch.equal(codes[~readable.isnan()], expected_codes[~readable.isnan()])
        values = nvfp4.dequantize(expected, torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32)
        assert got.values.dtype == values.dtype
        assert torch.equal(got.values.cpu().isnan(), values.isnan())
        same = torch.int16 if values.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(got.values.cpu().nan_to_num().view(same), values.nan_to_num().view(same))
        return codes

    @pytest.mark.parametrize("name", sorted(RECIPES))
    @pytest.mark.parametrize(("k", "dtype"), [(16, torch.float32), (704, torch.bfloat16)])
    def test_awkward_rows_under_each_recipe(self, name, k, dtype):
        recipe = RECIPES[name]
        x = awkward_rows(k).to(dtype)
        rollout = (x.float() * (1 + 0.01 * seeded(*x.shape))).nan_to_num(1.0, 1e30, -1e30)
        static = 0.01 if recipe.activation_global_scale == "per_tensor_static" else None
        for kind, tau, changes in (
            ("lsb", 0.5, {}),
            ("lsb", 0.1, {"global_scale": None}),
            ("byte", 0.25, {}),
            ("none", 0.5, {"present": None}),
        ):
            outcomes = outcomes_of(rollout, recipe, kind, static=static)
            self.check(x, replace(outcomes, **changes), recipe, tau=tau, global_scale=static)

    @pytest.mark.parametrize("kind", ["lsb", "byte"])
    def test_every_bf16_pattern(self, kind):
        patterns = bits_to_bf16(torch.arange(65536, dtype=torch.int32)).view(-1, 1024)
        rollout = patterns.float().nan_to_num(1.0, 3e38, -3e38) * (1 + 0.02 * seeded(64, 1024))
        self.check(patterns, outcomes_of(rollout.clamp(-3e38, 3e38), RECIPE, kind))
        self.check(patterns, outcomes_of(rollout.clamp(-3e38, 3e38), RECIPE, kind), global_scale=0.3)

    @pytest.mark.parametrize("tau", [0.5, 0.25, 0.125, 0.3])
    def test_every_bit_beside_every_value_of_the_grid_and_between(self, tau):
        """Fine steps over all cells, their boundaries and saturation, both signs, with both bits."""
        u = torch.arange(-7 * 64, 7 * 64 + 1, dtype=torch.float32) / 64
        u = torch.nn.functional.pad(u, (0, -len(u) % 16)).view(1, -1).repeat(2, 1)
        bits = torch.tensor([[0], [0xFFFF]], dtype=torch.int32).expand(2, u.shape[1] // 16).contiguous()
        one = torch.full(bits.shape, 0x38, dtype=torch.uint8)
        codes = self.check(u, Outcomes(bits, one, "byte", torch.ones(2)), tau=tau)
        assert len(codes.unique()) == 16

    def test_every_scale_follows_its_lowest_bit(self):
        """Block maxima over all of E4M3 and beyond it, with both bits."""
        amax = torch.cat((torch.linspace(0, 6 * 460, 3000), 6 * torch.logspace(-4, 3, 1000)))
        x = torch.zeros(amax.numel(), 16)
        x[:, 5] = amax
        for bit in (0, 1):
            scales = torch.full((amax.numel(), 1), bit, dtype=torch.uint8)
            hints = torch.zeros_like(scales, dtype=torch.int32)
            self.check(x, Outcomes(hints, scales, "lsb", torch.ones(amax.numel())))

    @pytest.mark.parametrize(
        ("k", "dtype"),
        [
            (16, torch.bfloat16),
            (48, torch.float32),
            (576, torch.float16),
            (576, torch.bfloat16),
            (2880, torch.bfloat16),
        ],
    )
    def test_odd_shapes_and_input_types(self, k, dtype):
        x = (seeded(7, k) * 3).to(dtype)
        x[1] = 0
        x[2, 3] = float("nan")
        x[5, :16] = -0.0
        x[6, 0] = float("inf")
        rollout = x.float().nan_to_num(0.0, 9.0, -9.0) + 0.05 * seeded(7, k, seed=8)
        for kind in KINDS:
            outcomes = outcomes_of(rollout, RECIPE, kind)
            self.check(x, outcomes)
        self.check(x, replace(outcomes, bits=outcomes.bits.to(torch.int32)), tau=0.25)

    def test_keys_take_the_static_scale(self):
        x = seeded(9, 128).bfloat16()
        outcomes = outcomes_of(x + 0.1 * seeded(9, 128, seed=9), RECIPE, "lsb", static=2.0**-6)
        self.check(x, replace(outcomes, global_scale=None), operand="kv", global_scale=2.0**-6)

    @pytest.mark.parametrize("kind", KINDS)
    def test_hints_that_equal_the_own_codes_give_nearest(self, kind):
        x = awkward_rows(256).bfloat16()
        x = x[x.isfinite().all(dim=1)]
        own = nvfp4.quantize_tokens(x, RECIPE)
        codes = self.check(x, replace(outcomes_of(x, RECIPE, kind), present=None))
        assert torch.equal(codes, nvfp4.unpack(own.codes))

    def test_no_rows_give_no_rows(self):
        empty = torch.zeros(0, 64, device=self.device)
        none = torch.zeros(0, 4, dtype=torch.uint8, device=self.device)
        got = follow_rows(
            empty, none.to(torch.int32), none, scale_kind="lsb", rules=nvfp4.PORTABLE_RULES, tau=0.5, values=True
        )
        assert got.quantized.codes.shape == (0, 32)
        assert got.values.shape == (0, 64)

    @pytest.mark.parametrize("recipe", [Recipe(four_over_six="experts"), PRESETS["default"]])
    def test_what_it_does_not_compute_is_left_to_torch(self, recipe):
        wide = recipe.four_over_six == "off"
        x = torch.zeros(1, 32768 + 16 if wide else 16, device=self.device)
        blocks = torch.zeros(1, x.shape[1] // 16, dtype=torch.uint8, device=self.device)
        outcomes = Outcomes(blocks.to(torch.int32), blocks, "byte")
        options = {"operand": "activations", "global_scale": None, "tau": 0.5, "values": False}
        assert fused(x, outcomes, recipe, **options) is None
