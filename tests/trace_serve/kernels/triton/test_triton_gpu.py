"""The cases of the interpreter on a card."""

import pytest
import torch
from kernel_cases import AttentionCases, ExpertCases, KVCases, RowCases
from rule_cases import RuleCases

from trace_serve.kernels.triton import gather_dequantize

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
