"""The cases in Triton's interpreter; run by `test_triton_interpreted.py` in a process of its own."""

from follow_cases import FollowCases
from kernel_cases import AttentionCases, ExpertCases, KVCases, RowCases
from rule_cases import RuleCases

from trace_serve.kernels.triton import _jit


def test_kernels_are_interpreted():
    assert _jit.INTERPRETED


class TestRows(RowCases):
    device = "cpu"


class TestRules(RuleCases):
    device = "cpu"


class TestKV(KVCases):
    device = "cpu"


class TestExperts(ExpertCases):
    device = "cpu"


class TestAttention(AttentionCases):
    device = "cpu"


class TestFollow(FollowCases):
    device = "cpu"
