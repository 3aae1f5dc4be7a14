"""What is asked: one module a workload. A request depends on the plan and its index alone."""

from __future__ import annotations

from trace_serve.load.plan import LoadPlan
from trace_serve.load.workloads.base import Request, Workload

__all__ = ["Request", "Workload", "open_workload"]


def open_workload(plan: LoadPlan) -> Workload:
    """Reads what the plan's workload needs.

    Raises:
        ConfigError: a file cannot be used; line and key are named.
    """
    if plan.workload == "chat":
        from trace_serve.load.workloads.chat import Chat

        return Chat(plan)
    if plan.workload in ("shared-prefix", "long-context"):
        from trace_serve.load.workloads import words

        return words.SharedPrefix(plan) if plan.workload == "shared-prefix" else words.LongContext(plan)
    from trace_serve.load.workloads import mooncake, request_log

    return mooncake.Mooncake(plan) if plan.workload == "mooncake" else request_log.RequestLog(plan)
