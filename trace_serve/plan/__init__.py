"""What hints, KV cache and weights of a model cost, and what FP4 can gain at best.

Every figure follows from the model's dimensions and the stated machine; the figures of arXiv 2610.07767 for
Qwen3.5-35B-A3B come out of the defaults.
"""

from trace_serve.plan.cli import plan_command, render
from trace_serve.plan.figures import Figure, PlanTable, plan, scheme_rows
from trace_serve.plan.roofline import (
    BF16_BITS,
    NVFP4_BITS,
    filled_batch,
    filled_tokens_per_second,
    kv_capacity_tokens,
    weight_bytes,
)
from trace_serve.plan.workload import Workload

__all__ = [
    "BF16_BITS",
    "NVFP4_BITS",
    "Figure",
    "PlanTable",
    "Workload",
    "filled_batch",
    "filled_tokens_per_second",
    "kv_capacity_tokens",
    "plan",
    "plan_command",
    "render",
    "scheme_rows",
    "weight_bytes",
]
