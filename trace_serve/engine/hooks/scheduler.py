"""Start, heartbeat and report of the scheduler process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import report, state
from trace_serve.engine.hooks.base import Hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def _start_method(result: object, *args: object) -> None:
    # Each spawned child would import SGLang again, which is most of the start-up time on a CPU. Forking is unsafe once
    # CUDA is initialised, so a card keeps SGLang's own choice.
    if not torch.cuda.is_available():
        multiprocessing.set_start_method("fork", force=True)


def _announce_forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    engine = state.get()
    engine.telemetry.beat()
    engine.begin_forward(forward_batch.out_cache_loc)


def _beat(self: Any, *args: Any, **kwargs: Any) -> None:
    state.get().telemetry.beat()


def _init_info(result: dict[str, Any], self: Any) -> dict[str, Any]:
    return {**result, report.KEY: report.from_scheduler(self)}


HOOKS: tuple[Hook, ...] = (
    Hook(
        "start-method",
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        HookType.AFTER,
        _start_method,
        "slow start on a CPU",
    ),
    Hook(
        "forward",
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        HookType.BEFORE,
        _announce_forward,
        "captured rows have no slots",
    ),
    Hook("heartbeat", f"{_SCHEDULER}.ingest_requests", HookType.BEFORE, _beat, "a frozen scheduler looks alive"),
    Hook("init-info", f"{_SCHEDULER}.get_init_info", HookType.AFTER, _init_info, "the scheduler cannot report"),
)
