"""`python -m trace_serve.server POLICY ...` is `trace-serve serve POLICY ...`."""

import typer

from trace_serve.server.cli import serve

if __name__ == "__main__":
    typer.run(serve)
