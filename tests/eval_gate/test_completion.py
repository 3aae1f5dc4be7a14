"""Shells complete commands, flags and values; what they start for it loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval_gate.commands.completion import Shell

COMMAND = f"{sys.executable} -m eval_gate.cli"


def complete(shell: str, line: str) -> list[str]:
    """What `eval-gate` answers when the script of `shell` asks it to complete the line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    asked = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {**os.environ, "_EVAL_GATE_COMPLETE": f"complete_{shell}", **(words if shell == "bash" else asked)}
    done = subprocess.run([*COMMAND.split()], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.split()


@pytest.mark.parametrize("shell", list(Shell))
def test_each_shell_gets_a_script_for_this_program_and_answers_for_it(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eval_gate.cli", "completion", shell], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"_EVAL_GATE_COMPLETE=complete_{shell}" in done.stdout
    assert "eval-gate" in done.stdout
    assert "attribute" in " ".join(complete(shell, "eval-gate at"))
    found = " ".join(complete(shell, "eval-gate run --margin-kind "))
    assert "absolute" in found
    assert "relative" in found


def test_bash_completes_flags_through_the_script(tmp_path: Path) -> None:
    program = tmp_path / "eval-gate"
    program.write_text(f'#!/bin/sh\nexec {COMMAND} "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(eval-gate completion bash)"; COMP_WORDS=(eval-gate compare --base); COMP_CWORD=2; '
        '_eval_gate_completion eval-gate; echo "${COMPREPLY[*]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "--baseline-floor", done.stderr


def test_ctrl_c_while_the_program_is_still_loading_is_an_exit_code_and_no_traceback(tmp_path: Path) -> None:
    # The interrupt comes with the first module that the command line loads, at the earliest moment there is.
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*COMMAND.split(), "plan"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_parsing_a_command_line_loads_neither_numerics_nor_network_nor_cryptography() -> None:
    heavy = ["numpy", "scipy", "aiohttp", "cryptography", "torch"]
    code = "import sys, eval_gate.commands.app; print([name for name in sys.argv[1:] if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
