"""The SGLang plugin: registers our methods and every hook, in each process of the engine.

It acts only in an engine that `launch` started; in any other SGLang process of the same environment it does nothing.
SGLang logs a plugin's failure and goes on, so nothing here is trusted to have happened: `seams` checks it afterwards.
"""

from __future__ import annotations

from typing import Any

from trace_serve.engine import spec, state


def register() -> None:
    """Entry point of group `sglang.srt.plugins`."""
    engine_spec = spec.from_env()
    if engine_spec is None:
        return
    engine = state.create(engine_spec)
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers import quantization
    from sglang.srt.plugins.hook_registry import HookRegistry

    from trace_serve.engine import hooks, kv, start
    from trace_serve.engine.moe import TraceNvFp4Config

    add_quantization_method_choices([spec.QUANTIZATION])
    for registry in (quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS):
        _insert_first(registry, spec.QUANTIZATION, TraceNvFp4Config)
    kv.register()
    for hook in hooks.HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.type)
    engine.check_seams = start.publish


def _insert_first(registry: dict[str, Any], name: str, value: Any) -> None:
    """SGLang takes the first method that claims a checkpoint, so ours has to come first."""
    rest = {key: item for key, item in registry.items() if key != name}
    registry.clear()
    registry.update({name: value, **rest})
