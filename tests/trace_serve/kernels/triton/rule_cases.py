"""The Triton quantizers under every recipe that they implement equal the reference bit for bit, on any device."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_rows, bits, bits_to_bf16, seeded
from rule_sets import EVERY, NAMED, PAPER_WEIGHTS, awkward_rows, by_name

from trace_serve import nvfp4
from trace_serve.errors import RecipeError
from trace_serve.kernels import get_kernels
from trace_serve.kernels.triton import KVBuffers, quantize_rows, quantize_silu_and_mul, silu_and_mul, store_kv
from trace_serve.recipe import Recipe


class RuleCases:
    device: str

    def check(self, x, rules, **options):
        x = x.to(self.device)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        got = quantize_rows(x, rules=rules, counters=counted, hints=True, values=True, **options)
        expected = get_kernels("reference", self.device).quantize_rows(
            x, rules=rules, counters=expected_counts, **options
        )
        assert_rows(got, expected, counted, expected_counts)
        return got

    @by_name
    @pytest.mark.parametrize(("k", "dtype"), [(16, torch.float32), (704, torch.bfloat16)])
    def test_awkward_rows_under_each_recipe(self, rules, k, dtype):
        x = awkward_rows(k).to(dtype)
        self.check(x, rules)
        self.check(x, rules, rotation=16)
        self.check(x, rules, global_scale=0.037)

    @pytest.mark.parametrize("part", range(4))
    def test_awkward_rows_under_every_combination_of_choices(self, part):
        x = awkward_rows(64).bfloat16()
        for i, rules in enumerate(EVERY[part::4]):
            self.check(x, rules, global_scale=(None, 2.0**-9)[i // 2 % 2])

    @by_name
    def test_every_bf16_pattern_under_each_recipe(self, rules):
        patterns = bits_to_bf16(torch.arange(65536, dtype=torch.int32))
        self.check(patterns.view(-1, 64), rules)
        self.check(patterns.view(-1, 64), rules, global_scale=0.3)

    def test_a_scale_whose_arithmetic_starts_from_its_reciprocal(self):
        x = awkward_rows(256)
        for amax in (0.051, 3.7e-4, 900.0):
            g = torch.tensor(amax) / torch.tensor(2688.0)
            got = self.check(x, PAPER_WEIGHTS, global_scale=float(g), encode_scale=float(g.reciprocal()))
            assert torch.equal(got.quantized.global_scale.cpu(), g.expand(12))

    def test_ties_go_where_the_rules_say(self):
        ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]
        x = torch.tensor([ties]).bfloat16().to(self.device)
        up = quantize_rows(x, rules=NAMED["ties up"], global_scale=1.0, values=True).values
        assert up[0].tolist() == [6.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0]

    @by_name
    def test_the_middle_input_under_each_recipe(self, rules):
        gate_up = (seeded(6, 2 * 352) * 4).bfloat16()
        gate_up[1] = 0
        gate_up[2, 3] = float("nan")
        gate_up = gate_up.to(self.device)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        got = quantize_silu_and_mul(gate_up, rules=rules, counters=counted, hints=True, values=True)
        expected = get_kernels("reference", self.device).quantize_rows(
            silu_and_mul(gate_up), rules=rules, counters=expected_counts
        )
        assert_rows(got, expected, counted, expected_counts)

    @by_name
    def test_keys_and_values_under_each_recipe(self, rules):
        heads, d, slots = 2, 64, 16
        x = awkward_rows(heads * d).bfloat16().view(12, heads, d).to(self.device)
        shapes = [(slots, heads, d // 2)] * 2 + [(slots, heads, d // 16)] * 2
        buffers = KVBuffers(*(torch.zeros(shape, dtype=torch.uint8, device=self.device) for shape in shapes))
        index = torch.arange(12, device=self.device)
        counted, expected_counts = nvfp4.new_counters(self.device), nvfp4.new_counters(self.device)
        scales = {"k_global_scale": 0.037, "v_global_scale": 2.0**-5}
        # Not a wider rotation: across lanes the interpreter sums -0 and -0 to 0, and `saturate` keeps the sign.
        hints = store_kv(x, x, index, buffers, **scales, rules=rules, k_rotation=16, counters=counted, hints=True)
        reference = get_kernels("reference", self.device)
        for codes, stored, hint, g, rotation in (
            (buffers.k_codes, buffers.k_scales, hints[0], 0.037, 16),
            (buffers.v_codes, buffers.v_scales, hints[1], 2.0**-5, 0),
        ):
            expected = reference.quantize_rows(
                x.view(-1, d), rules=rules, rotation=rotation, global_scale=g, hints=True, counters=expected_counts
            )
            assert torch.equal(codes[:12].view(-1, d // 2), expected.codes)
            assert torch.equal(stored[:12].view(-1, d // 16), expected.scales)
            assert torch.equal(bits(hint).view(-1, d // 16), bits(expected.hints))
        assert counted.tolist() == expected_counts.tolist()

    @pytest.mark.parametrize("recipe", [Recipe(four_over_six="experts"), Recipe(weight_tiles="16x16")])
    def test_rules_that_are_not_implemented_are_refused(self, recipe):
        rules = nvfp4.rules(recipe, "weights")
        assert not get_kernels("triton", "cuda").implements(rules)
        with pytest.raises(RecipeError):
            quantize_rows(torch.zeros(16, 16, dtype=torch.bfloat16, device=self.device), rules=rules)
