"""Runs the RUN steps of the CPU image in a fresh virtual environment, where no image can be built.

    python tests/deploy/run_cpu_stage.py [--uv] [--keep DIR]

The stages `wheel` and `cpu` of deploy/docker/Dockerfile are followed in order: COPY copies into a directory that stands
for the image's root, RUN runs with that stage's ENV and with absolute paths moved below that directory. Steps that make
a user or install Debian's packages are named and left out; the base image, USER, HEALTHCHECK and ENTRYPOINT are not
exercised. Only a real build shows those. --uv answers `pip install` by uv, which has its own cache: the same packages,
sooner.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import dockerfile

ROOT = Path(__file__).parents[2]
STAGES = ("wheel", "cpu")
MOVED = ("/wheels", "/src", "/usr/local/bin/trace-serve")
NOT_RUN = ("groupadd", "apt-get")
PIP_BY_UV = """#!/bin/sh
case "$1" in
  wheel) exec python -m pip "$@" ;;
esac
for word; do
  shift
  case "$word" in --no-cache-dir) ;; *) set -- "$@" "$word" ;; esac
done
exec uv pip "$@"
"""


class Build:
    """Directories that stand for the images' roots, and one environment for all stages."""

    def __init__(self, place: Path, *, uv: bool) -> None:
        self._place = place
        self._venv = place / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(self._venv)], check=True)
        if uv:
            pip = self._venv / "bin/pip"
            pip.write_text(PIP_BY_UV)
            pip.chmod(0o755)

    def root(self, stage: str) -> Path:
        return self._place / stage

    def run(self, stage: dockerfile.Stage) -> None:
        workdir = self.root(stage.name)
        workdir.mkdir()
        for step in stage.instructions:
            if step.keyword == "WORKDIR":
                workdir = self.root(stage.name) / step.arguments.lstrip("/")
                workdir.mkdir(parents=True, exist_ok=True)
            elif step.keyword == "COPY":
                self._copy(stage, workdir, step)
            elif step.keyword == "RUN":
                self._step(stage, workdir, step)

    def _copy(self, stage: dockerfile.Stage, workdir: Path, step: dockerfile.Instruction) -> None:
        *sources, target = step.arguments.split()
        directory = target.endswith("/")
        place = workdir / target if not target.startswith("/") else self.root(stage.name) / target.lstrip("/")
        for source in sources:
            origin = ROOT / source
            goal = place / origin.name if directory else place
            goal.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():
                shutil.copytree(origin, goal, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy2(origin, goal)
        for flag in step.flags:
            if flag.startswith("--chmod="):
                goal.chmod(int(flag.removeprefix("--chmod="), 8))

    def _step(self, stage: dockerfile.Stage, workdir: Path, step: dockerfile.Instruction) -> None:
        shown = f"[{stage.name}] {step.arguments[:100]}"
        if step.arguments.startswith(NOT_RUN):
            print(f"{shown}: not run here", flush=True)
            return
        for flag in step.flags:
            options = dict(part.split("=", 1) for part in flag.removeprefix("--mount=").split(","))
            source = self.root(options["from"]) / options["source"].lstrip("/")
            shutil.copytree(source, self.root(stage.name) / options["target"].lstrip("/"))
        command = step.arguments
        for prefix in MOVED:
            command = command.replace(prefix, f"{self.root(stage.name)}{prefix}")
        environment = {
            **os.environ,
            **stage.environment(),
            "VIRTUAL_ENV": str(self._venv),
            "PATH": f"{self._venv}/bin:{os.environ['PATH']}",
        }
        environment.pop("PYTHONPATH", None)
        began = time.monotonic()
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=workdir, env=environment, check=True)
        print(f"{shown}: {time.monotonic() - began:.0f} s", flush=True)

    def finish(self) -> None:
        """The command of the image starts through its entrypoint."""
        entrypoint = self.root("cpu") / "usr/local/bin/trace-serve-entrypoint"
        environment = {**os.environ, "PATH": f"{self._venv}/bin:{os.environ['PATH']}"}
        subprocess.run(["dumb-init", "--single-child", "--", str(entrypoint), "--version"], env=environment, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the RUN steps of the CPU image in a fresh environment.")
    parser.add_argument("--uv", action="store_true", help="answer pip by uv")
    parser.add_argument("--keep", type=Path, help="an empty directory to leave everything in")
    options = parser.parse_args()
    parsed = dockerfile.parse(ROOT / "deploy/docker/Dockerfile")
    with tempfile.TemporaryDirectory(prefix="trace-serve-image-") as scratch:
        build = Build(options.keep or Path(scratch), uv=options.uv)
        for name in STAGES:
            build.run(parsed.stages[name])
        build.finish()
    print("every RUN step of the CPU image ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
