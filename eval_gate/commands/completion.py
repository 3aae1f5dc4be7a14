"""`eval-gate completion`: what a shell needs to complete the command line."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

PROGRAM = "eval-gate"


class Shell(StrEnum):
    """Shells that can be served."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to write for.")]) -> None:
    """Print a script that completes commands, flags and their values.

    bash and zsh: eval "$(eval-gate completion bash)" in the start-up file. fish: eval-gate completion fish | source.
    """
    from typer._completion_shared import get_completion_script

    variable = f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE"
    typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=variable, shell=shell.value))
