"""FlashInfer 0.7.2 on sm_100 and sm_103: experts and decode attention over operands that our quantizers rounded.

FlashInfer is imported only when something is called, never by importing this package. No call in here has run on a card
yet: `docs/kernels.md` says what was checked without one.
"""

from trace_serve.kernels.flashinfer.availability import NAME, available, reason
from trace_serve.kernels.flashinfer.contract import CALLS, Call, check_contract
from trace_serve.kernels.flashinfer.environment import exact_math_problem, require_exact_math
from trace_serve.kernels.flashinfer.experts import ExpertMid, FusedExperts, StagedExperts, experts_for
from trace_serve.kernels.flashinfer.kv import append_kv, decode_attention, paged_buffers, workspace
from trace_serve.kernels.flashinfer.weights import ExpertWeights, prepare_weights

__all__ = [
    "CALLS",
    "NAME",
    "Call",
    "ExpertMid",
    "ExpertWeights",
    "FusedExperts",
    "StagedExperts",
    "append_kv",
    "available",
    "check_contract",
    "decode_attention",
    "exact_math_problem",
    "experts_for",
    "paged_buffers",
    "prepare_weights",
    "reason",
    "require_exact_math",
    "workspace",
]
