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
from collections.abc import Callable
from typing import Any

from trace_serve.engine import spec, startup
from trace_serve.errors import SeamError, TraceServeError

_PARENT_POLL_S = 1.0


def _exit_with_parent(parent: int) -> None:
    """Kills this engine's whole process group once the process that started it is gone, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def prepare(argv: list[str]) -> Any:
    """Verifies the seams of this process and returns SGLang's arguments, the engine's key among them.

    Raises:
        SeamError: the process was not started by `engine.launch`, or a place in SGLang is not what it was.
        ConfigError: an argument cannot be right; `field` is the flag.
    """
    engine_spec = spec.from_env()
    if engine_spec is None:
        raise SeamError(f"{spec.ENV} is not set; start engines with trace_serve.engine.launch")
    key = os.environ.pop(spec.KEY_ENV, "")
    if not key:
        raise SeamError(f"{spec.KEY_ENV} is not set; start engines with trace_serve.engine.launch")
    _exit_with_parent(engine_spec.parent_pid)
    startup.mark("python and the first imports")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    startup.mark("plugin and the modules it hooks")
    from trace_serve.engine import refusals, seams, start

    seams.require(seams.check_process())
    startup.mark("seams")
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args([*argv, f"--api-key={key}"])
    startup.mark("arguments")
    start.refuse_unverified(server_args)
    if not engine_spec.recipe.is_bf16:
        refusals.refuse(server_args)
    return server_args


def _serve(argv: list[str]) -> None:
    server_args = prepare(argv)
    from sglang.launch_server import run_server

    run_server(server_args)


def main(run: Callable[[list[str]], None] = _serve) -> int:
    """Runs one of the engine's processes; returns its exit status and leaves the reason of a failure on stderr."""
    from sglang.srt.utils import kill_process_tree

    try:
        run(sys.argv[1:])
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
