"""The cases of the interpreter on a card."""

import pytest
import torch
from follow_cases import FollowCases
from kernel_cases import AttentionCases, ExpertCases, KVCases, RowCases, seeded
from rule_cases import RuleCases

from trace_serve import nvfp4
from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.quantize import guided_fake_quantize, guided_quantize
from trace_serve.kernels.triton import gather_dequantize
from trace_serve.recipe import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: the kernels ran in the interpreter only"),
]


class TestRows(RowCases):
    device = "cuda"


class TestRules(RuleCases):
    device = "cuda"


class TestKV(KVCases):
    device = "cuda"

    def test_a_slot_outside_the_pool_reads_as_nan(self):
        codes = torch.zeros(8, 1, 8, dtype=torch.uint8, device="cuda")
        read = gather_dequantize(codes, codes[..., :1].contiguous(), torch.tensor([0, 8, -1], device="cuda"), 1.0)
        assert read.isnan().all(dim=-1).flatten().tolist() == [False, True, True]


class TestExperts(ExpertCases):
    device = "cuda"


class TestAttention(AttentionCases):
    device = "cuda"


class TestFollow(FollowCases):
    device = "cuda"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_guided_rounding_takes_the_kernel_and_passes_the_gradient(self, dtype):
        x = seeded(4, 3, 128).to(dtype)
        kept = nvfp4.quantize_tokens(x + 0.05 * seeded(4, 3, 128, seed=8).to(dtype), Recipe())
        outcomes = Outcomes(nvfp4.hint_bits(kept.codes), kept.scales & 1, "lsb", kept.global_scale)
        there = Outcomes(outcomes.bits.cuda(), outcomes.scales.cuda(), "lsb", outcomes.global_scale.cuda())
        on_card = x.cuda().requires_grad_()
        out = guided_fake_quantize(on_card, there, Recipe())
        out.backward(torch.ones_like(out))
        assert torch.equal(on_card.grad, torch.ones_like(out))
        assert torch.equal(out.cpu(), guided_fake_quantize(x, outcomes, Recipe()))
        got, expected = guided_quantize(x.cuda(), there, Recipe()), guided_quantize(x, outcomes, Recipe())
        assert torch.equal(got.codes.cpu(), expected.codes)
        assert got.scales.shape == expected.scales.shape
        assert got.global_scale.shape == expected.global_scale.shape
