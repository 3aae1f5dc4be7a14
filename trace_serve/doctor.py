"""`trace-serve doctor`: what this installation has, what is wrong with it, and what to do about each fault.

Whatever imports torch or SGLang runs in a process of its own, so that a crash there is a row here.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trace_serve import patching
from trace_serve.errors import EXIT_CONFIG, TraceServeError

State = Literal["ok", "warn", "missing"]

DISTRIBUTIONS: tuple[tuple[str, str, State], ...] = (
    ("fastapi", "trace-serve", "missing"),
    ("pydantic", "trace-serve", "missing"),
    ("sglang", "trace-serve[engine]", "missing"),
    ("torch", "trace-serve[engine]", "missing"),
    ("triton", "trace-serve[engine]", "missing"),
    ("transformers", "trace-serve[engine]", "missing"),
    ("flashinfer-python", "trace-serve[engine]", "missing"),
    ("locust", "trace-serve[load]", "warn"),
)
"""Each distribution, what installs it, and how bad its absence is."""

ENTRY_POINTS = ("sglang.bootstrap", "sglang.srt.plugins")
"""Groups in which SGLang looks for us."""

PROBE_TIMEOUT_S = 180.0
LOW_DISK_BYTES = 5 << 30
LOW_OPEN_FILES = 1024

_APPLY = "trace-serve patch apply"
_SEAMS = (sys.executable, "-m", "trace_serve.engine.seams", "--json")
_KERNELS = (
    sys.executable,
    "-c",
    "import dataclasses, json, torch; from trace_serve.kernels import available; "
    "device = 'cuda' if torch.cuda.is_available() else 'cpu'; "
    "print(json.dumps({'device': device, 'backends': [dataclasses.asdict(b) for b in available(device)]}))",
)


@dataclass(frozen=True)
class Check:
    """One row: `remedy` is empty when there is nothing to do. Only `missing` makes the doctor fail."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def check_python(requires: str, version: str, prefix: str = sys.prefix) -> Check:
    """The interpreter against the distribution's `requires-python`."""
    detail = f"{version} in {prefix}"
    if SpecifierSet(requires).contains(version, prereleases=True):
        return Check("python", "ok", detail)
    return Check("python", "missing", f"got {detail}, expected {requires}", "make an environment with such a Python")


def check_distribution(name: str, origin: str, absent: State, pins: Mapping[str, SpecifierSet]) -> Check:
    """One distribution's version against what trace-serve and SGLang require of it."""
    pin = pins.get(name, SpecifierSet())
    remedy = f"pip install '{origin}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, absent, f"not installed, expected {str(pin) or 'any version'}", remedy)
    if pin.contains(version, prereleases=True):
        return Check(name, "ok", version)
    return Check(name, "missing", f"got {version}, expected {pin}", remedy)


def read_pins() -> dict[str, SpecifierSet]:
    """What trace-serve and the installed SGLang require, by distribution name; both lists apply."""
    pins: dict[str, SpecifierSet] = {}
    for owner in ("trace-serve", "sglang"):
        try:
            lines = metadata.requires(owner) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            applies = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", "engine", "load")
            )
            if applies:
                name = requirement.name.replace("_", "-").lower()
                pins[name] = pins.get(name, SpecifierSet()) & requirement.specifier
    return pins


def check_patches(target: Path | None = None, patches: Path | None = None) -> list[Check]:
    """One row a patch."""
    try:
        status = patching.status(target, patches)
    except TraceServeError as exc:
        message, _, remedy = str(exc).partition("; ")
        return [Check("patches", "missing", message, remedy)]
    states = {file.path: file.state for file in status.files}
    rows = []
    for patch in status.patches:
        name = f"patch {patch.name.removesuffix('.patch')}"
        if patch.state == "applied":
            rows.append(Check(name, "ok", patch.subject))
            continue
        faulty = [path if states[path] == "clean" else f"{path} ({states[path]})" for path in patch.files]
        remedy = _reinstall() if patch.state == "changed" else _APPLY
        rows.append(Check(name, "missing", f"not applied: {', '.join(faulty)}", remedy))
    return rows


def check_entry_points(environment: Mapping[str, str]) -> list[Check]:
    """Whether SGLang will find the plugin, and is allowed to load it."""
    rows = []
    for group in ENTRY_POINTS:
        name = f"entry point {group}"
        found = [point.value for point in metadata.entry_points(group=group, name="trace_serve")]
        if found:
            rows.append(Check(name, "ok", found[0]))
        else:
            rows.append(Check(name, "missing", "trace_serve is not registered", "reinstall: pip install 'trace-serve'"))
    allowed = environment.get("SGLANG_PLUGINS", "")
    if allowed and "trace_serve" not in [part.strip() for part in allowed.split(",")]:
        rows.append(Check("SGLANG_PLUGINS", "missing", f"got {allowed!r}, trace_serve is left out", "unset it"))
    return rows


def check_seams(
    command: Sequence[str] = _SEAMS, timeout_s: float = PROBE_TIMEOUT_S, *, patched: bool = True
) -> list[Check]:
    """One row a seam, from a process that imports SGLang; patches have rows of their own, see `check_patches`.

    Args:
        patched: every patch is applied; if not, that is the first thing to mend, as other seams fail in its wake.
        command: prints a JSON list of seams (`name`, `kind`, `target`, `ok`, `detail`) as its last line.
        timeout_s: seconds after which it counts as failed.
    """

    def rows(seams: Any) -> list[Check]:
        return [
            Check(
                f"seam {seam['name']}",
                "ok" if seam["ok"] else "missing",
                str(seam["target"] if seam["ok"] else f"{seam['target']}: {_first_line(seam['detail'])}"),
                "" if seam["ok"] else _reinstall() if patched else _APPLY,
            )
            for seam in seams
            if seam["kind"] != "patch"
        ]

    return _probe("seams", command, timeout_s, rows)


def check_kernels(command: Sequence[str] = _KERNELS, timeout_s: float = PROBE_TIMEOUT_S) -> list[Check]:
    """One row: the backends that can run on this device, and why the others cannot.

    Args:
        command: prints a JSON object with `device` and `backends` (`name`, `usable`, `reason`) as its last line.
        timeout_s: seconds after which it counts as failed.
    """

    def rows(report: Any) -> list[Check]:
        usable = [backend["name"] for backend in report["backends"] if backend["usable"]]
        others = [f"{backend['name']} {backend['reason']}" for backend in report["backends"] if not backend["usable"]]
        detail = "; ".join([", ".join(usable) or "none", *others])
        name = f"kernels on {report['device']}"
        if usable:
            return [Check(name, "ok", detail)]
        return [Check(name, "missing", detail, "pip install 'trace-serve[engine]'")]

    return _probe("kernels", command, timeout_s, rows)


def check_disk(directory: Path, free: int | None = None) -> Check:
    """Room for models and results below `directory`; `free` is in bytes."""
    free = shutil.disk_usage(directory).free if free is None else free
    detail = f"{free / 2**30:.1f} GiB free in {directory}"
    if free >= LOW_DISK_BYTES:
        return Check("disk", "ok", detail)
    return Check("disk", "warn", f"{detail}, the quickstart wants {LOW_DISK_BYTES >> 30} GiB", "free some space")


def check_open_files(limit: int | None = None) -> Check:
    """The soft limit of open files: each connection of a server takes two."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= LOW_OPEN_FILES:
        return Check("open files", "ok", "unlimited" if limit == resource.RLIM_INFINITY else str(limit))
    return Check("open files", "warn", f"got {limit}, expected {LOW_OPEN_FILES} or more", "ulimit -n 65536")


def run_checks() -> list[Check]:
    """Every check, in the order in which faults are best mended. Takes as long as importing SGLang does."""
    patches = check_patches()
    patched = all(row.state == "ok" for row in patches)
    with ThreadPoolExecutor(max_workers=2) as pool:
        seams, kernels = pool.submit(check_seams, patched=patched), pool.submit(check_kernels)
        rows = [*_check_self(), *patches, *check_entry_points(os.environ)]
        rows += [check_disk(Path.cwd()), check_open_files()]
        return [*rows, *kernels.result(), *seams.result()]


def _check_self() -> list[Check]:
    pins = read_pins()
    python = ".".join(map(str, sys.version_info[:3]))
    rows = [check_distribution(name, origin, absent, pins) for name, origin, absent in DISTRIBUTIONS]
    try:
        own = metadata.metadata("trace-serve")
    except metadata.PackageNotFoundError:
        return [Check("trace-serve", "missing", "not installed as a distribution", "pip install trace-serve"), *rows]
    return [check_python(own["Requires-Python"], python), Check("trace-serve", "ok", own["Version"]), *rows]


def _reinstall() -> str:
    pin = read_pins().get("sglang", SpecifierSet())
    return f"pip install --force-reinstall --no-deps 'sglang{pin}' && {_APPLY}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _probe(name: str, command: Sequence[str], timeout_s: float, rows: Callable[[Any], list[Check]]) -> list[Check]:
    environment = dict(os.environ)
    if not Path("/dev/nvidiactl").exists():
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return [Check(name, "missing", f"no answer within {timeout_s:g} s", f"run `{_shown(command)}` and look")]
    try:
        found = rows(json.loads(done.stdout.strip().rpartition("\n")[2]))
    except (ValueError, KeyError, TypeError):
        found = []
    if found:
        return found
    said = (done.stderr.strip() or done.stdout.strip() or "nothing printed").rpartition("\n")[2]
    return [Check(name, "missing", f"exit code {done.returncode}: {said}", f"run `{_shown(command)}` and look")]


def _shown(command: Sequence[str]) -> str:
    return " ".join(["python", *command[1:]]) if "-c" not in command else "python -c 'import trace_serve.kernels'"


def _print_table(rows: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    table = Table(box=None, pad_edge=False)
    for column in ("check", "state", "detail", "what to do"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(Text(row.name), Text(row.state, style=styles[row.state]), Text(row.detail), Text(row.remedy))
    Console().print(table)


def doctor_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Check versions, patches, every seam, kernels and limits. Exit code 0 when nothing is missing, else 3."""
    rows = run_checks()
    missing = [row for row in rows if row.state == "missing"]
    if as_json:
        typer.echo(
            json.dumps({"schema_version": 1, "ok": not missing, "checks": [asdict(row) for row in rows]}, indent=2)
        )
    else:
        _print_table(rows)
        if missing:
            typer.echo(f"{len(missing)} of {len(rows)} checks failed. Start with: {missing[0].remedy}")
        else:
            typer.echo(f"all {len(rows)} checks passed")
    return EXIT_CONFIG if missing else 0
