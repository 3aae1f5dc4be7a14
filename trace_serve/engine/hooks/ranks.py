"""What several ranks of one model need on the CPU engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine.hooks.base import Hook


def _without_nccl(original: Callable[..., Any], self: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's CUDA build brings the NCCL library, which SGLang then starts on a device that is no card."""
    if torch.cuda.is_available():
        return original(self, group, *args, **kwargs)
    self.group = group
    self.rank, self.world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    self.available, self.disabled = False, True
    return None


HOOKS: tuple[Hook, ...] = (
    Hook(
        "no-nccl-on-cpu",
        "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        HookType.AROUND,
        _without_nccl,
        "tensor parallelism on a CPU fails in NCCL",
        ("self", "group", "device", "library_path", "is_symmetric_memory_enabled", "cta_policy"),
    ),
)
