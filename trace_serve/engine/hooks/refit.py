"""Weight updates: every one of them makes the rows written before it rows of another version."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import state
from trace_serve.engine.hooks.base import Hook

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)


def _weights_changed(result: object, self: Any, *args: Any, **kwargs: Any) -> None:
    state.get().weight_version += 1


HOOKS: tuple[Hook, ...] = tuple(
    Hook(f"refit-{name}", f"{_UPDATER}.{name}", HookType.AFTER, _weights_changed, "old rows pass for new ones")
    for name in _UPDATES
)
