"""Every place in SGLang that the patch layer relies on, by name, and whether it is what we expect.

`check_all` (doctor, and `python -m trace_serve.engine.seams --json`) looks at an installation; `check_process` looks at
the running process of an engine after the plugin ran. SGLang only logs a hook whose target is gone, so a start that
does not ask would serve BF16 and call it FP4.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from trace_serve import patching
from trace_serve.errors import PatchError, SeamError


@dataclass(frozen=True)
class SeamStatus:
    """Attributes:
    name: the seam's name in errors and in `doctor`.
    kind: `patch`, `hook` or `registry`.
    target: dotted path or file in SGLang.
    ok: whether it is as expected.
    detail: what was found, and what it costs when it is missing.
    """

    name: str
    kind: str
    target: str
    ok: bool
    detail: str


def _status(name: str, kind: str, target: str, check: Callable[[], str | None], why: str) -> SeamStatus:
    """`check` returns None when all is well, or what is wrong."""
    try:
        problem = check()
    except Exception as exc:
        # Importing a module of SGLang can fail in any way; each of them is a seam that is not what it was.
        problem = f"{type(exc).__name__}: {exc}"
    return SeamStatus(name, kind, target, problem is None, "ok" if problem is None else f"{problem} ({why})")


def _hook_exists(target: str, expected: tuple[str, ...] | None) -> str | None:
    found = pkgutil.resolve_name(target)
    # A class method without the class that it is bound to, so that it reads as it is written.
    function = getattr(found, "__func__", found)
    got = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    if expected is not None and got != expected:
        return f"parameters are {got}, expected {expected}"
    return None


def _hook_applied(target: str) -> str | None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return None if target in HookRegistry._patched else "the hook is not applied"


def _patches() -> list[SeamStatus]:
    """One status a patch, told by the digests of the files that it changes."""
    try:
        status = patching.status()
    except PatchError as exc:
        return [SeamStatus("patches", "patch", "sglang", False, str(exc))]
    return [
        SeamStatus(
            name=patch.name.removesuffix(".patch"),
            kind="patch",
            target=", ".join(patch.files),
            ok=patch.state == "applied",
            detail="ok"
            if patch.state == "applied"
            else f"{patch.state}; run `trace-serve patch apply` ({patch.subject})",
        )
        for patch in status.patches
    ]


REGISTRIES: tuple[tuple[str, str, type, str], ...] = (
    ("quantization-methods", "sglang.srt.layers.quantization.QUANTIZATION_METHODS", dict, "experts stay BF16"),
    ("quantization-methods-cpu", "sglang.srt.layers.quantization.CPU_QUANTIZATION_METHODS", dict, "experts stay BF16"),
    ("quantization-choices", "sglang.srt.arg_groups.choices.QUANTIZATION_CHOICES", list, "the flag is refused"),
    (
        "kv-registry",
        "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.KV_CACHE_QUANT_REGISTRY",
        dict,
        "KV stays BF16",
    ),
    (
        "kv-access-registry",
        "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.KV_CACHE_ATTENTION_ACCESS_REGISTRY",
        dict,
        "attention cannot read the pool",
    ),
)


def _is_a(target: str, kind: type) -> str | None:
    value = pkgutil.resolve_name(target)
    return None if isinstance(value, kind) else f"is a {type(value).__name__}, expected a {kind.__name__}"


def _holds_ours(target: str) -> str | None:
    from trace_serve.engine import spec

    value: Any = pkgutil.resolve_name(target)
    return None if spec.QUANTIZATION in value else "our entry is missing"


def check_all() -> list[SeamStatus]:
    """Looks at the installed SGLang: patched files, hook targets and their signatures, registries."""
    from trace_serve.engine import hooks

    return [
        *_patches(),
        *(
            _status(hook.name, "hook", hook.target, partial(_hook_exists, hook.target, hook.parameters), hook.why)
            for hook in hooks.HOOKS
        ),
        *(
            _status(name, "registry", target, partial(_is_a, target, kind), why)
            for name, target, kind, why in REGISTRIES
        ),
    ]


def check_process() -> list[SeamStatus]:
    """`check_all`, and that in this process every hook is applied and every registry holds our entry."""
    from trace_serve.engine import hooks

    live = [
        *(
            _status(hook.name, "hook", hook.target, partial(_hook_applied, hook.target), hook.why)
            for hook in hooks.HOOKS
        ),
        *(_status(name, "registry", target, partial(_holds_ours, target), why) for name, target, _, why in REGISTRIES),
    ]
    broken = {status.name: status for status in live if not status.ok}
    return [broken.get(status.name, status) for status in check_all()]


def process_summary() -> dict[str, str]:
    """`check_process` by name: `ok`, or what is wrong."""
    return {status.name: "ok" if status.ok else status.detail for status in check_process()}


def require(statuses: list[SeamStatus]) -> None:
    """Raises:
    SeamError: naming every seam that is not as expected.
    """
    broken = [status for status in statuses if not status.ok]
    if broken:
        found = "; ".join(f"seam {status.name} ({status.target}): {status.detail}" for status in broken)
        raise SeamError(f"{found}. Run `trace-serve doctor`")


def declared() -> list[dict[str, Any]]:
    """What hooks and registries expect of SGLang, for a check of another release that does not import it."""
    from trace_serve.engine import hooks

    return [
        *(
            {"name": h.name, "kind": "hook", "target": h.target, "parameters": h.parameters, "type": None, "why": h.why}
            for h in hooks.HOOKS
        ),
        *(
            {"name": name, "kind": "registry", "target": target, "parameters": None, "type": kind.__name__, "why": why}
            for name, target, kind, why in REGISTRIES
        ),
    ]


def main() -> int:
    """Prints the installation's seams; exit code 1 when one is missing. With `--declared`, what they should be."""
    if "--declared" in sys.argv[1:]:
        print(json.dumps(declared()))
        return 0
    statuses = check_all()
    if "--json" in sys.argv[1:]:
        print(json.dumps([asdict(status) for status in statuses]))
    else:
        for status in statuses:
            print(f"{'ok     ' if status.ok else 'missing'} {status.kind:8} {status.name:28} {status.detail}")
    return 0 if all(status.ok for status in statuses) else 1


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.exit(main())
