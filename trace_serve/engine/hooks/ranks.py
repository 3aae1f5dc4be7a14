"""What several ranks of one model need on the CPU engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import ranks, state
from trace_serve.engine.hooks.base import Hook
from trace_serve.errors import EngineError


def _without_nccl(original: Callable[..., Any], self: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's CUDA build brings the NCCL library, which SGLang then starts on a device that is no card."""
    if torch.cuda.is_available():
        return original(self, group, *args, **kwargs)
    self.group = group
    self.rank, self.world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    self.available, self.disabled = False, True
    return None


def _know_ranks(self: Any, *args: Any, **kwargs: Any) -> None:
    engine = state.get()
    engine.ranks = ranks.current()
    engine.widths = ranks.widths_of(self.model_config)
    if engine.ranks.size != engine.telemetry.ranks:
        raise EngineError(
            f"--tp-size: got {engine.ranks.size}, but the engine was started for {engine.telemetry.ranks} ranks; set "
            "tensor_parallel of EngineConfig instead"
        )
    engine.telemetry.lane = engine.ranks.rank


HOOKS: tuple[Hook, ...] = (
    Hook(
        "ranks",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        HookType.BEFORE,
        _know_ranks,
        "every rank rounds on a grid of its own",
        ("self",),
    ),
    Hook(
        "no-nccl-on-cpu",
        "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        HookType.AROUND,
        _without_nccl,
        "tensor parallelism on a CPU fails in NCCL",
        ("self", "group", "device", "library_path", "is_symmetric_memory_enabled", "cta_policy"),
    ),
)
