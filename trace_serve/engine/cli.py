"""`trace-serve engine`: one engine alone, for front-ends on other machines that name it by its URL."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trace_serve.errors import ConfigError, EngineError
from trace_serve.settings import Settings

if TYPE_CHECKING:
    from trace_serve.engine.launch import EngineProcess

_POLL_S = 0.5
_SHORTEST_KEY = 16


def engine(
    policy: Annotated[Path, typer.Argument(help="Policy directory.")],
    engine_key_file: Annotated[
        Path | None, typer.Option(help="File (mode 0600) with the bearer key of this engine.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    hint_dir: Annotated[Path | None, typer.Option(help="Directory for hint files.")] = None,
    hint_sites: Annotated[str | None, typer.Option(help="Sites to keep: experts_in, k, v, experts_mid.")] = None,
    hint_layers: Annotated[str | None, typer.Option(help="all, deeper-half, or layer indices as in 3,4,5.")] = None,
    hint_codes: Annotated[str | None, typer.Option(help="lsb, or full for whole codes.")] = None,
    hint_scale: Annotated[str | None, typer.Option(help="lsb, byte or none.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Cards of this machine that share the model.")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="Size of the KV pool in tokens.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Tokens; default is the model's own.")] = None,
    engine_args: Annotated[str | None, typer.Option(help="Further arguments of SGLang's server.")] = None,
    engine_log: Annotated[Path, typer.Option(help="File for the engine's output.")] = Path("engine.log"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print SGLang's arguments as it resolves them; start nothing.")
    ] = False,
) -> None:
    """Runs one engine until SIGTERM or Ctrl-C; `trace-serve serve --engine-url` is the front-end of it.

    Whoever has the key may ask, and replace the weights: keep the port inside the deployment. Nothing restarts the
    engine; what runs the command should. Exit codes: 0 after a signal, 3 for an argument or seam that is not right, 4
    when the engine is lost.
    """
    from trace_serve.engine.launch import EngineProcess
    from trace_serve.engine.settings import engine_config
    from trace_serve.policy.manifest import load_policy

    opened = load_policy(policy)
    settings = Settings.load(
        hint_dir=hint_dir,
        hint_sites=hint_sites,
        hint_layers=hint_layers,
        hint_codes=hint_codes,
        hint_scale=hint_scale,
        device=device,
        tensor_parallel=tensor_parallel,
        max_total_tokens=max_total_tokens,
        context_length=context_length,
        engine_args=engine_args,
        engine_log=engine_log,
    )
    config = dataclasses.replace(engine_config(settings, opened.path, opened.recipe), host=host, port=port)
    if dry_run:
        typer.echo(json.dumps(EngineProcess(config).resolve(), indent=2))
        return
    _serve(EngineProcess(config, _key(engine_key_file)), settings.engine_start_timeout_s)


def _key(path: Path | None) -> str:
    from trace_serve.server.keys.private import read_private

    if path is None:
        raise ConfigError(
            "--engine-key-file: missing; make one with `openssl rand -hex 24 > engine.key && chmod 600 engine.key`",
            field="engine_key_file",
        )
    key = read_private(path, flag="--engine-key-file")[0].decode("ascii", "replace").strip()
    if len(key) < _SHORTEST_KEY or not key.isalnum() or not key.isascii():
        raise ConfigError(
            f"--engine-key-file: got {len(key)} characters, expected one key of {_SHORTEST_KEY} letters and digits or "
            "more",
            field="engine_key_file",
        )
    return key


def _serve(process: EngineProcess, start_timeout_s: float) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def waiting(seconds: float) -> None:
        if stop.is_set():
            raise InterruptedError

    try:
        process.start()
        report = process.wait_ready(start_timeout_s, progress=waiting)
        told = {"ready": process.url, "policy_digest": report["policy_digest"], "recipe_id": report["recipe_id"]}
        typer.echo(json.dumps(told))
        while not stop.wait(_POLL_S):
            if process.poll() is not None:
                raise EngineError(f"the engine exited with status {process.poll()}: {process.last_words()}")
    except InterruptedError:
        pass
    finally:
        process.stop()
