"""Reading checkpoints: checked before the first tensor is loaded; packed experts become BF16 images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import expert_images, state
from trace_serve.engine.hooks.base import Hook
from trace_serve.policy.layouts import BF16


def _weights(original: Callable[..., Any], self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    from trace_serve.checkpoints.reader import open_checkpoint

    recipe = state.get().spec.recipe
    directory = Path(source.model_or_path)
    if recipe.experts == "bf16" or not directory.is_dir():
        return original(self, source, *args, **kwargs)
    checkpoint = open_checkpoint(directory, recipe)
    tensors = original(self, source, *args, **kwargs)
    expert_images.begin(BF16 if checkpoint is None else checkpoint.declared.layout.name)
    if checkpoint is None:
        return tensors
    return checkpoint.expand(tensors, expert_images.remember)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "checkpoint",
        "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator",
        HookType.AROUND,
        _weights,
        "packed experts cannot be loaded, and damage is found too late",
        ("self", "source", "resolved_source", "startup_prefetch_started", "startup_prefetch_active"),
    ),
)
