"""The engine that a server's settings describe."""

from __future__ import annotations

import shlex
from pathlib import Path

from trace_serve.engine.config import EngineConfig
from trace_serve.errors import ConfigError
from trace_serve.recipe import Recipe
from trace_serve.settings import Settings


def engine_config(settings: Settings, model: Path, recipe: Recipe) -> EngineConfig:
    """How to run a policy on loopback.

    Raises:
        ConfigError: `engine_args` is no command line.
    """
    try:
        extra = tuple(shlex.split(settings.engine_args))
    except ValueError as exc:
        raise ConfigError(f"engine_args: got {settings.engine_args!r}: {exc}", field="engine_args") from exc
    if settings.tool_call_parser is not None:
        extra = (f"--tool-call-parser={settings.tool_call_parser}", *extra)
    return EngineConfig(
        model=model,
        recipe=recipe,
        hint_dir=settings.hint_dir,
        hints=settings.hints,
        hint_ttl_s=settings.hint_ttl_s,
        hint_dir_bytes=settings.hint_dir_max_bytes,
        log_path=settings.engine_log,
        max_total_tokens=settings.kv_tokens,
        max_running_requests=settings.max_running_requests,
        chunked_prefill_size=settings.chunked_prefill_size,
        context_length=settings.context_length,
        stall_limit_s=settings.engine_stall_limit_s,
        tensor_parallel=settings.tensor_parallel,
        device=settings.device,
        metrics=settings.engine_metrics,
        extra_args=extra,
    )
