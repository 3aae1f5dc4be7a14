"""A start is verified before its port opens: every process says what its seams are, and all have to be ok.

SGLang logs a plugin's failure and goes on, and some modes of its server run processes that load no plugins at all.
So each scheduler and detokenizer leaves its seams in the run directory; the process that started them looks there for
every one of their process ids; and modes in which something else would serve are refused by name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trace_serve.engine import report, seams, state
from trace_serve.errors import ConfigError, SeamError
from trace_serve.hints.wire import write_bytes

_DETOKENIZER_TIMEOUT_S = 180.0
_POLL_S = 0.02

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "tokenizer_worker_num",
        lambda value: value != 1,
        "SGLang's extra HTTP workers take no API key, load no plugins and so check no request for hints; expected 1, "
        "start more engines instead",
    ),
    ("smg_grpc_mode", bool, "its gRPC server has neither the API key nor the hints; remove it"),
    ("grpc_mode", bool, "its gRPC server has neither the API key nor the hints; remove it"),
    ("grpc_port", lambda value: value is not None, "its gRPC listener asks for no API key; remove it"),
    (
        "nnodes",
        lambda value: value != 1,
        "engines of several machines would not find each other, and nothing here verifies those of the others; run "
        "SGLang's own server on each machine, or an engine on each behind the front-end or smg",
    ),
    ("use_ray", bool, "its actors are started by Ray, where nothing verifies them; remove it"),
    ("encoder_only", bool, "an encoder has no experts and no KV cache; remove it"),
)
_RUST_SERVER = "SGLANG_RUST_SERVER"

_detokenizers: list[Any] = []


def refuse_unverified(server_args: Any) -> None:
    """Raises:
    ConfigError: an argument of SGLang's server starts processes that nothing verifies; `field` is the flag.
    """
    for name, bad, why in _REFUSED:
        value = getattr(server_args, name, None)
        if value is not None and bad(value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: got {value!r}: {why}", field=flag)
    if os.environ.get(_RUST_SERVER, "0").lower() not in ("", "0", "false"):
        raise ConfigError(f"{_RUST_SERVER}: SGLang's Rust server loads no plugins; unset it", field=_RUST_SERVER)


def publish() -> dict[str, str]:
    """This process's seams by name, `ok` or what is wrong; also left in the run directory for who started it."""
    summary = seams.process_summary()
    write_bytes(_path(os.getpid()), json.dumps(summary).encode())
    return summary


def require_published(role: str, pid: int) -> None:
    """Checks what one process published.

    Raises:
        SeamError: nothing, or a seam that is not ok; the message names the process and the seam.
    """
    try:
        found: dict[str, str] = json.loads(_path(pid).read_bytes())
    except FileNotFoundError:
        found = {}
    if not found:
        raise SeamError(
            f"{role} {pid} did not report its seams, so the plugin did not run in it; "
            "unset SGLANG_PLUGINS and run `trace-serve doctor`"
        )
    broken = "; ".join(f"seam {name}: {detail}" for name, detail in found.items() if detail != "ok")
    if broken:
        raise SeamError(f"{role} {pid}: {broken}. Run `trace-serve doctor`")


def schedulers_ready(infos: list[dict[str, Any]], readers: object, processes: list[Any]) -> None:
    """After SGLang heard from every scheduler of this machine, or from the controller that started them."""
    for process, info in zip(processes, infos, strict=False):
        for pid in info.get("scheduler_pids") or [process.pid]:
            require_published("scheduler", pid)


def detokenizers_started(result: tuple[list[Any], list[str]], *args: object, **kwargs: object) -> None:
    """After the detokenizers were started; they are waited for only once the schedulers have loaded the model.

    The router in front of several detokenizers only passes messages on, and loads no plugins.
    """
    processes, names = result
    _detokenizers[:] = [p for p, name in zip(processes, names, strict=True) if "router" not in name]


def detokenizer_ready(result: object, *args: object, **kwargs: object) -> None:
    """In a detokenizer, before its event loop."""
    publish()


def verified_start(
    original: Callable[..., Any],
    server_args: Any,
    tokenizer_manager: Any,
    template_manager: Any,
    port_args: Any,
    scheduler_infos: list[dict[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around the HTTP server: the last checks, and our own routes, before the port opens.

    Raises:
        SeamError: a process is not what it should be.
    """
    from trace_serve.engine import routes

    loaded = scheduler_infos[0].get(report.KEY)
    if loaded is None:
        raise SeamError("seam init-info: the scheduler did not report what it loaded; run `trace-serve doctor`")
    if not _detokenizers:
        raise SeamError("seam detokenizers: no detokenizer was seen starting; run `trace-serve doctor`")
    _await(_detokenizers)
    from sglang.srt.entrypoints import http_server

    state.get().layers = loaded["hints"]["layers_total"]
    routes.install(http_server.app, scheduler_infos)
    return original(server_args, tokenizer_manager, template_manager, port_args, scheduler_infos, *args, **kwargs)


def _await(processes: Iterable[Any]) -> None:
    deadline = time.monotonic() + _DETOKENIZER_TIMEOUT_S
    for process in processes:
        while not _path(process.pid).exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        require_published("detokenizer", process.pid)


def _path(pid: int) -> Path:
    return Path(state.get().spec.run_dir) / f"seams-{pid}.json"
