"""Every SGLang function that the patch layer wraps, and what the wrapper does.

`HOOKS` is the one list: the plugin registers it, `seams` checks it. A wrapper keeps SGLang's own behaviour for requests
and layers that are not ours.
"""

from __future__ import annotations

from trace_serve.engine.hooks import (
    attention,
    checkpoint,
    hints,
    kv,
    linear_attention,
    openai,
    ranks,
    refit,
    rollouts,
    scheduler,
    start,
)
from trace_serve.engine.hooks.base import Hook

HOOKS: tuple[Hook, ...] = (
    *start.HOOKS,
    *scheduler.HOOKS,
    *kv.HOOKS,
    *attention.HOOKS,
    *linear_attention.HOOKS,
    *checkpoint.HOOKS,
    *hints.HOOKS,
    *openai.HOOKS,
    *rollouts.HOOKS,
    *refit.HOOKS,
    *ranks.HOOKS,
)

__all__ = ["HOOKS", "Hook"]
