"""Answers that are programs: run with unit tests in a sandbox."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from eval_gate.checkers import sandbox, text
from eval_gate.checkers.outcome import CheckerError, Grade

if TYPE_CHECKING:
    from eval_gate.checkers.specs import UnitTests

_WALL_FACTOR = 4

WITHOUT_ISOLATION = "EVAL_GATE_CODE_WITHOUT_ISOLATION"
"""Set to 1 in a worker whose operator allowed programs to reach the network."""

# The first process of the sandbox only waits for the second, which runs the program: a namespace's first process is
# deaf to the signal of the CPU limit. The second reads the token after the tests, so a program that ends early has not
# passed, whatever its exit code.
_HARNESS = """
import os, signal, sys
token_in, echo_out, status_out = map(int, sys.argv[1:])
child = os.fork()
if child:
    os.close(token_in)
    os.write(status_out, b"started ")
    _, status = os.waitpid(child, 0)
    os.write(status_out, str(os.waitstatus_to_exitcode(status)).encode())
    sys.exit()
os.close(status_out)
scope = {"__name__": "__main__"}
for name in ("answer.py", "tests.py"):
    with open(name, encoding="utf-8") as source:
        exec(compile(source.read(), name, "exec"), scope)
sys.stdout.flush()
os.write(echo_out, os.read(token_in, 64))
"""


def wall_limit_s(checker: UnitTests) -> float:
    """Seconds that a program gets by the clock, start included."""
    return float(_WALL_FACTOR * checker.cpu_s + 2)


def grade(checker: UnitTests, answer: str) -> Grade:
    """Runs the last code block of the answer and then the tests.

    A program that fails, ends early or uses up its processor time is wrong.

    Raises:
        CheckerError: there is no sandbox, or the program was stopped from outside or by the clock before it had used
            its processor time, which says more about the machine than about the program.
    """
    program = text.last_code_block(answer, "python")
    isolation = sandbox.network_isolation()
    if isolation is None and os.environ.get(WITHOUT_ISOLATION) != "1":
        raise CheckerError("code: no network isolation on this machine (unshare failed)")
    with tempfile.TemporaryDirectory(prefix="eval-gate-") as name:
        directory = Path(name)
        for file, source in (("answer.py", program), ("tests.py", checker.tests), ("harness.py", _HARNESS)):
            (directory / file).write_text(source, encoding="utf-8", errors="replace")
        token = secrets.token_hex(16).encode()
        finished, echoed, status = _run(checker, directory, isolation or (), token)
    if finished.timed_out:
        raise CheckerError(
            f"code: neither an end nor {checker.cpu_s} s of processor time in {wall_limit_s(checker):g} s"
        )
    started, _, code = status.partition(b" ")
    if not started:
        raise CheckerError(f"code: the sandbox did not start: {finished.output.strip()[-200:] or finished.returncode}")
    if not code or int(code) == -signal.SIGKILL:
        raise CheckerError("code: the program was killed from outside")
    if int(code) == -signal.SIGXCPU:
        return Grade(False, f"more than {checker.cpu_s} s of processor time")
    if int(code) == 0 and echoed == token:
        return Grade(True, program[:500])
    lines = finished.output.strip().splitlines()
    return Grade(False, (lines[-1] if lines else f"exit code {int(code)}")[:500])


def _run(
    checker: UnitTests, directory: Path, isolation: tuple[str, ...], token: bytes
) -> tuple[sandbox.Finished, bytes, bytes]:
    token_in, token_out = os.pipe()
    echo_in, echo_out = os.pipe()
    status_in, status_out = os.pipe()
    try:
        os.write(token_out, token)
        finished = sandbox.run(
            ["harness.py", str(token_in), str(echo_out), str(status_out)],
            directory,
            isolation=isolation,
            cpu_s=checker.cpu_s,
            memory_mb=checker.memory_mb,
            wall_s=wall_limit_s(checker),
            pass_fds=(token_in, echo_out, status_out),
        )
        return finished, _available(echo_in), _available(status_in)
    finally:
        for descriptor in (token_in, token_out, echo_in, echo_out, status_in, status_out):
            os.close(descriptor)


def _available(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 64)
    except BlockingIOError:
        return b""
