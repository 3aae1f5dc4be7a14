"""A process for a model's program: no network, its own process tree, bounded processor time, memory and files.

It keeps out accidents and the network, not a determined attacker: the program can read what this user can read. Run
the gate in a container when the programs are not trusted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ISOLATION = (
    ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"),
    ("unshare", "--map-root-user", "--net"),
)
_FILE_BYTES = 16 << 20
_PROCESSES = 128
_OPEN_FILES = 64
_TAIL_BYTES = 2000


class Finished(NamedTuple):
    """How a program ended.

    Attributes:
        returncode: as in `subprocess`.
        output: the last of what it printed.
        timed_out: it was killed after the wall-clock limit.
    """

    returncode: int
    output: str
    timed_out: bool


@cache
def network_isolation() -> tuple[str, ...] | None:
    """The strongest `unshare` command that works for this user; None when none does."""
    for command in _ISOLATION:
        try:
            done = subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return command
    return None


def run(
    arguments: Sequence[str],
    directory: Path,
    *,
    isolation: Sequence[str],
    cpu_s: int,
    memory_mb: int,
    wall_s: float,
    pass_fds: Sequence[int] = (),
) -> Finished:
    """Runs Python with `arguments` in `directory` with an empty environment, and kills its whole tree at the end."""

    def limit() -> None:
        # The soft limit ends a process by SIGXCPU, which tells a slow program from a machine that is too busy.
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if isolation and _counts_processes_by_namespace():
            resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))

    environment = {"PATH": os.defpath, "HOME": str(directory), "TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    # Output goes to a file because its size is limited there; a pipe would have to be read into memory.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*isolation, sys.executable, "-I", "-B", *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            preexec_fn=limit,
            start_new_session=True,
        )
        try:
            returncode, timed_out = process.wait(wall_s), False
        except subprocess.TimeoutExpired:
            returncode, timed_out = -signal.SIGKILL, True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return Finished(returncode, output.read().decode("utf-8", "replace"), timed_out)


def _counts_processes_by_namespace() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts within the user namespace; before, it counts all processes of the user."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)
