"""Where a start is verified, see `trace_serve.engine.start`."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import start
from trace_serve.engine.hooks.base import Hook

_ENGINE = "sglang.srt.entrypoints.engine"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "verified-start",
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        HookType.AROUND,
        start.verified_start,
        "nothing checks a start, and the engine lacks its routes",
        (
            "server_args",
            "tokenizer_manager",
            "template_manager",
            "port_args",
            "scheduler_infos",
            "subprocess_watchdog",
            "execute_warmup_func",
            "launch_callback",
        ),
    ),
    Hook(
        "schedulers-ready",
        f"{_ENGINE}._wait_for_scheduler_ready",
        HookType.AFTER,
        start.schedulers_ready,
        "nothing checks the schedulers",
        ("scheduler_pipe_readers", "scheduler_procs"),
    ),
    Hook(
        "detokenizers",
        f"{_ENGINE}.Engine._launch_detokenizer_subprocesses",
        HookType.AFTER,
        start.detokenizers_started,
        "nothing checks the detokenizers",
        ("cls", "server_args", "port_args", "run_detokenizer_process_func"),
    ),
    Hook(
        "detokenizer-ready",
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.__init__",
        HookType.AFTER,
        start.detokenizer_ready,
        "a detokenizer cannot report",
        ("self", "server_args", "port_args"),
    ),
)
