"""What of the patch layer still fits another SGLang release, told from its wheel; nothing in the wheel is run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError
from trace_serve.patching.fit import Fit, PatchFit, fit_series
from trace_serve.patching.series import load_series
from trace_serve.patching.source_tree import Function, NotThere, Wheel, imported_names, parameters
from trace_serve.patching.target import DISTRIBUTION, patch_dir

DECLARED = (sys.executable, "-m", "trace_serve.engine.seams", "--declared")
_TIMEOUT_S = 180.0
_ENGINE = Path(__file__).resolve().parent.parent / "engine"


@dataclass(frozen=True)
class SeamFit:
    """Attributes:
    name: the seam's name, or for an import the file that does it.
    kind: `hook`, `registry` or `import`.
    target: dotted path in SGLang.
    ok: whether it is as expected.
    detail: what is wrong, and what it costs; empty where it is as expected.
    """

    name: str
    kind: str
    target: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class ReleaseReport:
    """Attributes:
    version: of the release that was looked at.
    patches: each patch of the series, in order.
    seams: hook targets, registries and imported names.
    """

    version: str
    patches: tuple[PatchFit, ...]
    seams: tuple[SeamFit, ...]

    @property
    def ok(self) -> bool:
        """Whether the patch layer could move to this release with its diffs refreshed and nothing else changed."""
        return all(p.fit in (Fit.CLEAN, Fit.OFFSET) for p in self.patches) and all(seam.ok for seam in self.seams)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "sglang": self.version,
            "ok": self.ok,
            "patches": [patch.to_dict() for patch in self.patches],
            "seams": [asdict(seam) for seam in self.seams],
        }


def check_release(wheel: Path, patches: Path | None = None, declared: Sequence[str] | None = None) -> ReleaseReport:
    """Reads a wheel of SGLang; neither it nor the installed one is touched.

    Args:
        wheel: the file.
        patches: a patch directory; None means the shipped patches.
        declared: command whose last line is a JSON list of seams (`name`, `kind`, `target`, `parameters`, `type`,
            `why`), None for our own; a process, because hooks import the installed SGLang.

    Raises:
        ConfigError: not a readable wheel of SGLang, or the seams cannot be listed.
        PatchError: the patches are unusable.
    """
    sources = Wheel(wheel, DISTRIBUTION)
    fits = fit_series(load_series(patches or patch_dir()), sources.read)
    seams = [_seam_fit(sources, seam) for seam in _declared(declared or DECLARED)]
    return ReleaseReport(sources.version, fits, (*seams, *_imports(sources)))


def _declared(command: Sequence[str]) -> list[dict[str, Any]]:
    environment = dict(os.environ)
    if not Path("/dev/nvidiactl").exists():
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment, check=False
        )
        found = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"the seams were not listed within {_TIMEOUT_S:g} s; run `trace-serve doctor`") from exc
    except ValueError as exc:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing printed").rpartition("\n")[2]
        raise ConfigError(
            f"the seams cannot be listed (exit code {done.returncode}: {said}); the hooks import the installed SGLang, "
            "so this needs `pip install 'trace-serve[engine]'` and `trace-serve patch apply`"
        ) from exc
    if not isinstance(found, list) or not found:
        raise ConfigError(f"the seams cannot be listed: got {str(found)[:80]!r}; run `trace-serve doctor`")
    return found


def _seam_fit(sources: Wheel, seam: Mapping[str, Any]) -> SeamFit:
    problem = _problem(sources, seam)
    detail = "" if problem is None else f"{problem} ({seam['why']})"
    return SeamFit(seam["name"], seam["kind"], seam["target"], problem is None, detail)


def _problem(sources: Wheel, seam: Mapping[str, Any]) -> str | None:
    try:
        found = sources.find(seam["target"])
    except NotThere as exc:
        return str(exc)
    if found.kind == "external":
        return f"comes from {found.module} now"
    if seam["kind"] == "registry":
        return None if _may_be(found.node, seam["type"]) else f"is no {seam['type']} any more"
    if not isinstance(found.node, Function):
        return f"is a {found.kind}, expected a function"
    got, expected = parameters(found.node), seam["parameters"]
    if expected is not None and got != tuple(expected):
        return f"parameters are ({', '.join(got)}), expected ({', '.join(expected)})"
    return None


def _may_be(node: ast.AST | None, kind: str) -> bool:
    """Whether an assigned expression can have the type; one that only running it would tell is given the benefit."""
    literals: dict[type[ast.AST], str] = {
        ast.Dict: "dict",
        ast.DictComp: "dict",
        ast.List: "list",
        ast.ListComp: "list",
        ast.Set: "set",
        ast.SetComp: "set",
        ast.Tuple: "tuple",
        ast.Constant: "constant",
    }
    return node is not None and literals.get(type(node), kind) == kind


def _imports(sources: Wheel) -> list[SeamFit]:
    """Every name that the engine layer imports from SGLang, base classes included."""
    fits: dict[str, SeamFit] = {}
    for path in sorted(_ENGINE.rglob("*.py")):
        for target, line in imported_names(path.read_bytes(), DISTRIBUTION).items():
            if target in fits:
                continue
            where = f"{path.relative_to(_ENGINE.parent).as_posix()}:{line}"
            try:
                sources.find(target)
            except NotThere as exc:
                fits[target] = SeamFit(where, "import", target, False, str(exc))
            else:
                fits[target] = SeamFit(where, "import", target, True)
    return list(fits.values())
