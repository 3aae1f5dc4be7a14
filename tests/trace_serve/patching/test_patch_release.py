"""What still fits another SGLang release, told from wheels that are built here."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_site import FIRST, RELEASED, SECOND, make_patch

from trace_serve.cli import main
from trace_serve.errors import ConfigError
from trace_serve.patching import patch_dir
from trace_serve.patching.fit import Fit
from trace_serve.patching.release_check import ReleaseReport, check_release
from trace_serve.patching.series import load_series
from trace_serve.patching.source_tree import NotThere, Wheel
from trace_serve.patching.target import find_target

SOURCES = {
    "sglang/srt/base.py": b"""
import torch
class Base(torch.nn.Module):
    def inherited(self, req): ...
    @property
    def not_called(self): ...
def wrapped(a, /, b, *rest, c=1, **extra): ...
REGISTRY = {}
TYPED: dict[str, int] = {}
COMPUTED = dict(a=1)
CHOICES = ["x"]
""",
    "sglang/srt/user.py": b"""
from typing import TYPE_CHECKING
from sglang.srt.base import Base as Parent, wrapped
from .names import *
if TYPE_CHECKING:
    from sglang.srt.base import CHOICES
try:
    import torch
except ImportError:
    def fallback(x): ...
class Child(Parent):
    if True:
        async def own(self, obj, input_ids=None): ...
from torch import Tensor
raise RuntimeError("a check must not run what it looks at")
""",
    "sglang/srt/names.py": b"def starred(x): ...\n",
    "sglang/srt/package/__init__.py": b"from . import inner\nfrom .inner import deep\n",
    "sglang/srt/package/inner.py": b"def deep(y): ...\n",
    "sglang/srt/bare/file.py": b"def f(): ...\n",
    "sglang/srt/circle.py": b"from sglang.srt.circle import around\n",
}


def write_wheel(directory: Path, files: Mapping[str, bytes], *, name: str = "sglang", version: str = "9.9.9") -> Path:
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        for file, content in files.items():
            wheel.writestr(file, content)
    return path


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """Two patches for `fake_site.RELEASED`, as in the apply and revert tests, without a lock."""
    directory = tmp_path / "patches"
    directory.mkdir()
    make_patch(directory, "0001-first.patch", RELEASED, {**RELEASED, **FIRST})
    make_patch(directory, "0002-second.patch", {**RELEASED, **FIRST}, {**RELEASED, **FIRST, **SECOND})
    (directory / "series").write_text("0001-first.patch\n0002-second.patch\n")
    return directory


def declare(*seams: Mapping[str, Any]) -> tuple[str, ...]:
    filled = [{"name": "s", "kind": "hook", "parameters": None, "type": None, "why": "it is lost", **s} for s in seams]
    return (sys.executable, "-c", f"print('a log line'); print({json.dumps(filled)!r})")


def check(
    tmp_path: Path, patches: Path, files: Mapping[str, bytes] = RELEASED, *seams: Mapping[str, Any]
) -> ReleaseReport:
    seam = {"target": "sglang.srt.base.wrapped"}
    wheel = write_wheel(tmp_path, {**SOURCES, **files})
    return check_release(wheel, patches, declare(*(seams or (seam,))))


def test_the_release_they_were_made_for_is_clean(tmp_path: Path, patches: Path) -> None:
    report = check(tmp_path, patches)
    assert [patch.fit for patch in report.patches] == [Fit.CLEAN, Fit.CLEAN]
    assert report.version == "9.9.9"


def test_moved_lines_are_an_offset_and_still_fit(tmp_path: Path, patches: Path) -> None:
    path = "sglang/srt/scheduler.py"
    report = check(tmp_path, patches, {**RELEASED, path: b"new 1\nnew 2\n" + RELEASED[path]})
    assert [patch.fit for patch in report.patches] == [Fit.OFFSET, Fit.OFFSET]
    moved = [hunk for patch in report.patches for hunk in patch.hunks if hunk.path == path]
    assert {hunk.offset for hunk in moved} == {2}


def test_a_hunk_that_is_not_found_is_named_with_its_file_and_line(tmp_path: Path, patches: Path) -> None:
    path = "sglang/srt/scheduler.py"
    report = check(tmp_path, patches, {**RELEASED, path: RELEASED[path].replace(b"line 29\n", b"another line\n")})
    first, second = report.patches
    assert (first.fit, second.fit) == (Fit.CONFLICT, Fit.CLEAN)
    (bad,) = [hunk for hunk in first.hunks if hunk.fit is Fit.CONFLICT]
    assert (bad.path, bad.line, bad.detail) == (path, 27, "the release has no line 'line 29'")
    assert not report.ok


def test_a_missing_file_and_a_file_that_exists_already_are_conflicts(tmp_path: Path, patches: Path) -> None:
    files = {**RELEASED, "sglang/srt/extra/created.py": b"something else"}
    del files["sglang/srt/windows.py"]
    report = check(tmp_path, patches, files)
    details = {hunk.path: hunk.detail for patch in report.patches for hunk in patch.hunks if hunk.fit is Fit.CONFLICT}
    assert details == {
        "sglang/srt/windows.py": "no such file",
        "sglang/srt/extra/created.py": "the release has another file of that name",
    }


def test_a_change_that_the_release_has_already_is_told_from_a_conflict(tmp_path: Path, patches: Path) -> None:
    report = check(tmp_path, patches, {**RELEASED, **FIRST})
    assert [patch.fit for patch in report.patches] == [Fit.PRESENT, Fit.CLEAN]
    assert not report.ok, "the series has to lose that patch"


def test_half_of_a_change_being_there_is_a_conflict(tmp_path: Path, patches: Path) -> None:
    path = "sglang/srt/windows.py"
    report = check(tmp_path, patches, {**RELEASED, path: FIRST[path]})
    assert report.patches[0].fit is Fit.CONFLICT


def test_the_shipped_patches_fit_the_installed_release_they_are_locked_to(tmp_path: Path) -> None:
    installed = find_target()
    series = load_series(patch_dir())
    released = {path: series.backward(path, installed.read(path) or b"") or b"" for path in series.paths}
    report = check_release(write_wheel(tmp_path, {**SOURCES, **released}), None, declare({"target": "sglang.srt.base"}))
    assert {patch.fit for patch in report.patches} == {Fit.CLEAN}


@pytest.mark.parametrize(
    ("target", "kind", "module"),
    [
        ("sglang.srt.base.wrapped", "function", "sglang.srt.base"),
        ("sglang.srt.user.wrapped", "function", "sglang.srt.base"),
        ("sglang.srt.user.Child.inherited", "function", "sglang.srt.base"),
        ("sglang.srt.user.Child.own", "function", "sglang.srt.user"),
        ("sglang.srt.user.starred", "function", "sglang.srt.names"),
        ("sglang.srt.user.fallback", "function", "sglang.srt.user"),
        ("sglang.srt.user.Tensor", "external", "torch"),
        ("sglang.srt.package.inner.deep", "function", "sglang.srt.package.inner"),
        ("sglang.srt.package.deep", "function", "sglang.srt.package.inner"),
        ("sglang.srt.package.inner", "module", "sglang.srt.package.inner"),
        ("sglang.srt.base.REGISTRY", "value", "sglang.srt.base"),
        ("sglang.srt.base.TYPED", "value", "sglang.srt.base"),
    ],
)
def test_a_name_is_found_where_it_is_defined(tmp_path: Path, target: str, kind: str, module: str) -> None:
    found = Wheel(write_wheel(tmp_path, SOURCES), "sglang").find(target)
    assert (found.kind, found.module) == (kind, module)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sglang.srt.base.gone", "module sglang.srt.base has no gone"),
        ("sglang.srt.user.Child.gone", "class Child of sglang.srt.user has no gone"),
        ("sglang.srt.user.CHOICES", "module sglang.srt.user has no CHOICES"),
        ("sglang.srt.bare.gone.f", "there is no module sglang.srt.bare.gone"),
        ("sglang.srt.circle.around", "imported in a circle"),
        ("other.thing", "there is no module other"),
        ("sglang.srt.base.wrapped.deeper", "not looked up in a function"),
    ],
)
def test_a_name_that_is_gone_is_told_with_what_it_is_gone_from(tmp_path: Path, target: str, message: str) -> None:
    with pytest.raises(NotThere, match=message):
        Wheel(write_wheel(tmp_path, SOURCES), "sglang").find(target)


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        ({"target": "sglang.srt.base.wrapped", "parameters": ["a", "b", "rest", "c", "extra"]}, None),
        ({"target": "sglang.srt.user.Child.own", "parameters": ["self", "obj", "input_ids"]}, None),
        (
            {"target": "sglang.srt.user.Child.own", "parameters": ["self", "obj"]},
            "parameters are (self, obj, input_ids), expected (self, obj) (it is lost)",
        ),
        ({"target": "sglang.srt.base.Base"}, "is a class, expected a function (it is lost)"),
        ({"target": "sglang.srt.base.gone"}, "module sglang.srt.base has no gone (it is lost)"),
        ({"target": "sglang.srt.base.REGISTRY", "kind": "registry", "type": "dict"}, None),
        ({"target": "sglang.srt.base.COMPUTED", "kind": "registry", "type": "dict"}, None),
        ({"target": "sglang.srt.base.CHOICES", "kind": "registry", "type": "list"}, None),
        (
            {"target": "sglang.srt.base.CHOICES", "kind": "registry", "type": "dict"},
            "is no dict any more (it is lost)",
        ),
        ({"target": "sglang.srt.user.Tensor", "kind": "registry", "type": "dict"}, "comes from torch now (it is lost)"),
    ],
)
def test_a_seam_is_judged_by_its_definition(
    tmp_path: Path, patches: Path, seam: Mapping[str, Any], problem: str | None
) -> None:
    found = check(tmp_path, patches, RELEASED, seam).seams[0]
    assert (found.ok, found.detail) == (problem is None, problem or "")


def test_names_that_the_engine_layer_imports_are_seams_too(tmp_path: Path, patches: Path) -> None:
    report = check(tmp_path, patches)
    imports = {seam.target: seam for seam in report.seams if seam.kind == "import"}
    hook_type = imports["sglang.srt.plugins.hook_registry.HookType"]
    assert not hook_type.ok
    assert hook_type.detail == "there is no module sglang.srt.plugins"
    assert hook_type.name.startswith("engine/")


def test_the_command_reports_and_exits_with_one_when_something_does_not_fit(
    tmp_path: Path, patches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = declare({"name": "kv-method", "target": "sglang.srt.base.gone"})
    monkeypatch.setattr("trace_serve.patching.release_check.DECLARED", command)
    wheel = write_wheel(tmp_path, {**SOURCES, **RELEASED})

    arguments = ["patch", "check", "--sglang-wheel", str(wheel), "--patches", str(patches)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "clean     0001-first.patch" in shown
    assert "missing   hook kv-method sglang.srt.base.gone: module sglang.srt.base has no gone (it is lost)" in shown
    assert "2 of 2 patches apply" in shown

    assert main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["sglang"], report["ok"]) == (1, "9.9.9", False)
    assert {patch["fit"] for patch in report["patches"]} == {"clean"}


def test_what_is_not_a_wheel_of_sglang_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.whl"
    text.write_text("not a zip")
    for path in (text, tmp_path / "missing.whl", write_wheel(tmp_path, {}, name="torch")):
        assert main(["patch", "check", "--sglang-wheel", str(path)]) == 3
        assert "--sglang-wheel" in capsys.readouterr().err


def test_a_source_that_does_not_parse_is_named(tmp_path: Path) -> None:
    wheel = Wheel(write_wheel(tmp_path, {"sglang/bad.py": b"def f(:\n"}), "sglang")
    with pytest.raises(ConfigError, match=r"sglang/bad\.py cannot be parsed"):
        wheel.find("sglang.bad.f")


def test_seams_that_cannot_be_listed_say_what_the_process_said(tmp_path: Path, patches: Path) -> None:
    wheel = write_wheel(tmp_path, {**SOURCES, **RELEASED})
    broken = (sys.executable, "-c", "raise SystemExit('No module named sglang')")
    with pytest.raises(ConfigError, match="No module named sglang"):
        check_release(wheel, patches, broken)
    with pytest.raises(ConfigError, match="cannot be listed"):
        check_release(wheel, patches, (sys.executable, "-c", "print('[]')"))
