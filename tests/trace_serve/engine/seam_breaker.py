"""Breaks one seam after the other and starts the engine's main program each time; then asks `patch_probe`. Prints JSON.

SGLang is imported once; each case is a fork of that process, because its imports take longer than everything else.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patch_probe
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry

from trace_serve import patching
from trace_serve.engine import hooks, main, plugin, seams, spec, state
from trace_serve.engine.telemetry import Telemetry
from trace_serve.patching.status import load_source
from trace_serve.patching.target import find_target
from trace_serve.recipe import Recipe

Case = tuple[str, str, Callable[[], None], tuple[str, ...]]
"""What is done to which seam, how, and further arguments of the engine."""


def owner_of(target: str) -> tuple[Any, str]:
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    if isinstance(owner, type):
        owner = next(base for base in owner.__mro__ if name in vars(base))
    return owner, name


def remove(target: str) -> None:
    """Also where it is inherited from: a method that moved into a base class is still there."""
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    owners = owner.__mro__[:-1] if isinstance(owner, type) else (owner,)
    for each in owners:
        if name in vars(each):
            delattr(each, name)


def replace(target: str, value: Any) -> None:
    setattr(*owner_of(target), value)


def moved(something_new: object) -> None:
    """Stands where a function of other parameters was."""


def leave_unapplied(target: str) -> None:
    original = HookRegistry._apply_target.__func__

    def apply(cls: Any, name: str, registered: Any) -> None:
        if name == target:
            raise RuntimeError("as if SGLang could not wrap it")
        original(cls, name, registered)

    HookRegistry._apply_target = classmethod(apply)


class DeafDict(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def update(self, *args: Any, **kwargs: Any) -> None:
        pass


class DeafList(list[Any]):
    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


def make_deaf(target: str) -> None:
    """A registry that takes no entries any more."""
    value = pkgutil.resolve_name(target)
    replace(target, DeafDict(value) if isinstance(value, dict) else DeafList(value))


def unpatch(patch: str) -> None:
    """SGLang comes from a tree in which the files of one patch are as released."""
    installed, source = find_target(), load_source(patching.patch_dir())
    root = Path(tempfile.mkdtemp())
    reverted = {diff.path for p in source.series.patches if p.name == patch for diff in p.files}
    for path in source.series.paths:
        content = installed.read(path)
        if path in reverted and content is not None:
            content = source.series.backward(path, content)
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
    module = sys.modules["sglang"]
    module.__spec__ = importlib.machinery.ModuleSpec("sglang", None, origin=str(root / "sglang" / "__init__.py"))


def fail(*args: object) -> None:
    raise RuntimeError("as if the plugin failed")


def cases() -> Iterator[Case]:
    nothing: tuple[str, ...] = ()
    for hook in hooks.HOOKS:
        yield "gone", hook.name, lambda target=hook.target: remove(target), nothing
        if hook.parameters is not None:
            yield "moved", hook.name, lambda target=hook.target: replace(target, moved), nothing
    first = hooks.HOOKS[0]
    yield "unapplied", first.name, lambda: leave_unapplied(first.target), nothing
    for name, target, _, _ in seams.REGISTRIES:
        yield "gone", name, lambda target=target: remove(target), nothing
        yield "other type", name, lambda target=target: replace(target, ()), nothing
        yield "deaf", name, lambda target=target: make_deaf(target), nothing
    for patch in load_source(patching.patch_dir()).series.patches:
        yield "unpatched", patch.name.removesuffix(".patch"), lambda name=patch.name: unpatch(name), nothing
    yield "plugin left out", first.name, lambda: os.environ.update(SGLANG_PLUGINS="another"), nothing
    yield "plugin fails", first.name, lambda: setattr(plugin, "_insert_first", fail), nothing
    for flag in (
        "--tokenizer-worker-num=2",
        "--grpc-port=1",
        "--use-ray",
        "--encoder-only",
        "--smg-grpc-mode",
        "--nnodes=2",
    ):
        yield "refused", flag.partition("=")[0], lambda: None, (flag,)
    yield "refused", "SGLANG_RUST_SERVER", lambda: os.environ.update(SGLANG_RUST_SERVER="1"), nothing


def run(case: Case, output: Path) -> int:
    """Runs the engine's main program with one seam broken, in a fork; its output goes to a file."""
    _, _, break_it, arguments = case
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 99
    with contextlib.suppress(BaseException):
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        try:
            engine = spec.EngineSpec(recipe=Recipe(), run_dir=str(output.parent), parent_pid=os.getppid())
            os.environ[spec.ENV], os.environ[spec.KEY_ENV] = engine.to_env(), "a-key"
            break_it()
            sys.argv = ["engine", "--model-path=/there/is/no/model", "--device=cpu", *arguments]
            code = main.main()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def everything() -> list[dict[str, Any]]:
    seams.check_all()
    # Most of a start's time until it is verified: SGLang looks through every module for copies of a wrapped function.
    # None of them is called here.
    hook_registry._propagate_patch = lambda *_: 0
    assert state._state is None, "the plugin must not have run before a seam is broken"
    found = []
    with tempfile.TemporaryDirectory() as directory:
        Telemetry(directory, create=True)
        output = Path(directory) / "output"
        for case in cases():
            code = run(case, output)
            found.append({"how": case[0], "seam": case[1], "code": code, "output": output.read_text()[-20_000:]})
    return found


if __name__ == "__main__":
    print(json.dumps({"seams": everything(), "patches": patch_probe.outcomes()}))
