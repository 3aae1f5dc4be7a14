"""Runs one plan: locust as a child process, headless, and the report that it leaves."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import trace_serve
from trace_serve.errors import EXIT_CONFIG, ConfigError, EngineError
from trace_serve.load.files import make_directory, read_report, write_whole
from trace_serve.load.plan import LoadPlan
from trace_serve.load.report import LoadReport

PLAN = "plan.json"
LOG = "locust.log"
STOP_S = 30.0


def locustfile() -> Path:
    """The locust file, of the source tree or of the installed wheel.

    Raises:
        ConfigError: this installation has none.
    """
    package = Path(trace_serve.__file__).parent
    for directory in (package / "_locust", package.parent / "deploy" / "locust"):
        if (directory / "locustfile.py").is_file():
            return directory / "locustfile.py"
    raise ConfigError(f"{package}: no locust file is installed with it; install trace-serve[load] again")


def processes_options(count: int) -> list[str]:
    """Options for several processes on this machine, whose port no other run on it uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    bound = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    return ["--processes", str(count), *bound]


def run_plan(plan: LoadPlan, host: str, out: Path, *, processes: int = 1) -> LoadReport:
    """Runs a plan to its end. Keys are taken from TRACE_SERVE_API_KEY and TRACE_SERVE_ADMIN_KEY by the child itself.

    Args:
        host: base URL of the server.
        out: directory for report, plan and locust's log.
        processes: how many processes send.

    Raises:
        ConfigError: the plan cannot be run as it is.
        EngineError: locust ended without a report.
    """
    make_directory(out)
    (out / "report.json").unlink(missing_ok=True)
    write_whole(out / PLAN, plan.model_dump_json(exclude_unset=True, indent=1) + "\n")
    command = [sys.executable, "-m", "locust", "--locustfile", str(locustfile()), "--headless", "--only-summary"]
    command += ["--host", host, "--plan", str(out / PLAN), "--out", str(out)]
    if processes > 1:
        command += processes_options(processes)
    with (out / LOG).open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:  # an interrupt from the terminal reaches the child as well
            process.terminate()
            process.wait(STOP_S)
            raise
    if (out / "report.json").exists():
        return read_report(out)
    lines = (out / LOG).read_text("utf-8", "replace").splitlines()
    fault = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if code == EXIT_CONFIG and fault is not None:
        raise ConfigError(fault)
    raise EngineError(f"locust ended with {code} and left no report, expected one; see {out / LOG}")
