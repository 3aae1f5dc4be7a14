"""The engine process: SGLang's own server, verified (`python -m trace_serve.engine.main ARGS`).

Arguments are SGLang's. The spec of the policy comes in the environment, see `spec`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from trace_serve.engine import report, spec, state
from trace_serve.errors import SeamError, TraceServeError

_PARENT_POLL_S = 1.0


def _verified_start(
    original: Any,
    server_args: Any,
    tokenizer_manager: Any,
    template: Any,
    ports: Any,
    infos: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs after every scheduler reported and before the port opens."""
    from sglang.srt.entrypoints import http_server

    from trace_serve.engine import routes

    for rank, info in enumerate(infos):
        loaded = info.get(report.KEY)
        if loaded is None:
            raise SeamError(
                f"seam init-info: scheduler {rank} did not report, so the plugin did not run in it; "
                "unset SGLANG_PLUGINS and run `trace-serve doctor`"
            )
        broken = {name: detail for name, detail in loaded["seams"].items() if detail != "ok"}
        if not loaded["seams"]:
            raise SeamError(f"scheduler {rank} did not check its seams; run `trace-serve doctor`")
        if broken:
            raise SeamError(f"scheduler {rank}: " + "; ".join(f"seam {name}: {d}" for name, d in broken.items()))
    state.get().layers = infos[0][report.KEY]["hints"]["layers_total"]
    routes.install(http_server.app, infos)
    return original(server_args, tokenizer_manager, template, ports, infos, *args, **kwargs)


def _exit_with_parent(parent: int) -> None:
    """Kills this engine's whole process group once the process that started it is gone, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def _run(argv: list[str]) -> None:
    engine_spec = spec.from_env()
    if engine_spec is None:
        raise SeamError(f"{spec.ENV} is not set; start engines with trace_serve.engine.launch")
    _exit_with_parent(engine_spec.parent_pid)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server", _verified_start, HookType.AROUND
    )
    load_plugins()
    from trace_serve.engine import seams

    seams.require(seams.check_process())
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(argv))


def main() -> int:
    from sglang.srt.utils import kill_process_tree

    try:
        _run(sys.argv[1:])
    except Exception as exc:
        # The launcher shows this line; the traceback stays in the log above it.
        known = isinstance(exc, TraceServeError)
        if not known:
            traceback.print_exc()
        print(f"{spec.FAILURE_PREFIX}{exc if known else f'{type(exc).__name__}: {exc}'}", file=sys.stderr, flush=True)
        if isinstance(exc, SeamError):
            return spec.EXIT_SEAM
        return exc.exit_code if isinstance(exc, TraceServeError) else 1
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
