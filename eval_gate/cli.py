"""The `eval-gate` command. Its imports are inside, so that Ctrl-C during them ends it as at any other time."""

from __future__ import annotations

import sys

from trace_serve.errors import EXIT_CONFIG, EXIT_INTERRUPTED, TraceServeError


def main() -> None:
    """Entry point: every expected error is one line on stderr and an exit code."""
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _run() -> int:
    import typer

    from eval_gate.commands.app import UsageError, app
    from eval_gate.commands.completion import PROGRAM
    from eval_gate.settings import ENVIRONMENT_PREFIX

    try:
        code = app(prog_name=PROGRAM, standalone_mode=False, auto_envvar_prefix=ENVIRONMENT_PREFIX)
    except UsageError as exc:
        message = " ".join(getattr(exc, "format_message", exc.__str__)().split())
        if message:
            print(f"error: {message}", file=sys.stderr)
        return EXIT_CONFIG
    except typer.Abort:
        return EXIT_INTERRUPTED
    except TraceServeError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
