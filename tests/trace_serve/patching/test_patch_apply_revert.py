"""Applying and reverting, on real files that are laid out like an installed SGLang."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_site import PATCHED, RELEASED, FakeSite

from trace_serve.errors import EXIT_CONFIG, PatchError
from trace_serve.patching import apply, revert, status, write_lock
from trace_serve.patching.status import RECORD, State

SCHEDULER = "sglang/srt/scheduler.py"
CREATED = "sglang/srt/extra/created.py"


def test_apply_gives_exactly_the_patched_files(site: FakeSite, patches: Path) -> None:
    outcome = apply(site.root, patches)

    assert site.snapshot() == {**RELEASED, **PATCHED}
    assert set(outcome.changed) == set(PATCHED)
    assert outcome.status.state is State.APPLIED


def test_apply_twice_changes_nothing_the_second_time(site: FakeSite, patches: Path) -> None:
    apply(site.root, patches)
    inodes = {path: (site.root / path).stat().st_ino for path in PATCHED}

    outcome = apply(site.root, patches)

    assert outcome.changed == ()
    assert inodes == {path: (site.root / path).stat().st_ino for path in PATCHED}


def test_revert_restores_every_byte_and_removes_what_was_created(site: FakeSite, patches: Path) -> None:
    apply(site.root, patches)

    outcome = revert(site.root, patches)

    assert outcome.status.state is State.CLEAN
    assert site.snapshot() == RELEASED
    assert not (site.root / CREATED).parent.exists()
    assert not (site.root / RECORD).exists()
    assert revert(site.root, patches).changed == ()


def test_a_file_hard_linked_from_a_cache_is_never_written_in_place(
    site: FakeSite, patches: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "cached.py"
    os.link(site.root / SCHEDULER, cached)

    apply(site.root, patches)

    assert cached.read_bytes() == RELEASED[SCHEDULER]


def test_the_mode_of_a_file_is_kept(site: FakeSite, patches: Path) -> None:
    (site.root / SCHEDULER).chmod(0o750)

    apply(site.root, patches)

    assert (site.root / SCHEDULER).stat().st_mode & 0o777 == 0o750


def test_another_release_is_refused_by_name(tmp_path: Path, patches: Path) -> None:
    other = FakeSite(tmp_path / "other", version="0.5.22")

    with pytest.raises(PatchError, match=r"got sglang 0\.5\.22 .* expected 0\.5\.23.*pip install") as raised:
        apply(other.root, patches)

    assert raised.value.exit_code == EXIT_CONFIG
    assert other.snapshot() == RELEASED


@pytest.mark.parametrize("operation", [apply, revert])
def test_a_file_changed_by_someone_else_is_named_and_nothing_is_touched(
    site: FakeSite, patches: Path, operation: object
) -> None:
    if operation is revert:
        apply(site.root, patches)
    site.write(SCHEDULER, b"edited by hand\n")
    before = site.snapshot()

    with pytest.raises(PatchError, match=r"scheduler\.py: was changed by something else.*--force-reinstall") as raised:
        operation(site.root, patches)  # type: ignore[operator]

    assert raised.value.field == SCHEDULER
    assert site.snapshot() == before


def test_a_missing_file_is_named(site: FakeSite, patches: Path) -> None:
    (site.root / SCHEDULER).unlink()

    with pytest.raises(PatchError, match=r"scheduler\.py: is missing"):
        apply(site.root, patches)


def test_a_foreign_file_where_a_patch_creates_one_is_refused(site: FakeSite, patches: Path) -> None:
    site.write(CREATED, b"somebody's own\n")

    with pytest.raises(PatchError, match=r"created\.py: was changed by something else"):
        apply(site.root, patches)

    assert (site.root / CREATED).read_bytes() == b"somebody's own\n"


def test_a_directory_in_place_of_a_file_is_refused(site: FakeSite, patches: Path) -> None:
    (site.root / "sglang/srt/no_newline.py").unlink()
    (site.root / "sglang/srt/no_newline.py").mkdir()

    with pytest.raises(PatchError, match=r"no_newline\.py: cannot be read"):
        apply(site.root, patches)

    assert (site.root / SCHEDULER).read_bytes() == RELEASED[SCHEDULER]


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("operation", [apply, revert])
def test_a_failure_at_any_replacement_rolls_everything_back(
    site: FakeSite, patches: Path, monkeypatch: pytest.MonkeyPatch, operation: object, failing: int
) -> None:
    if operation is revert:
        apply(site.root, patches)
    before = site.snapshot()
    inode = (site.root / SCHEDULER).stat().st_ino
    real, calls = Path.replace, 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal calls
        if self.name.endswith(".trace-serve-new"):
            calls += 1
            if calls == failing + 1:
                raise OSError(28, "No space left on device", str(target))
        return real(self, target)

    unlink = Path.unlink

    def unlink_or_fail(self: Path, missing_ok: bool = False) -> None:
        if failing == 3 and operation is revert and self.name == "created.py":
            raise OSError(28, "No space left on device", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Path, "unlink", unlink_or_fail)
    with pytest.raises(PatchError, match="No space left on device; nothing was changed"):
        operation(site.root, patches)  # type: ignore[operator]
    monkeypatch.undo()

    assert site.snapshot() == before
    assert (site.root / SCHEDULER).stat().st_ino == inode
    assert (site.root / CREATED).exists() == (operation is revert)
    assert (site.root / RECORD).exists() == (operation is revert)
    operation(site.root, patches)  # type: ignore[operator]
    assert site.snapshot() == (RELEASED if operation is revert else {**RELEASED, **PATCHED})


@pytest.mark.parametrize("operation", ["apply", "revert"])
@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_run_killed_half_way_can_be_finished_or_undone(
    site: FakeSite, patches: Path, operation: str, killed_at: int
) -> None:
    script = f"""
import os, pathlib
from trace_serve.patching import apply
real, calls = pathlib.Path.replace, 0
def replace(self, target):
    global calls
    if self.name.endswith(".trace-serve-new"):
        calls += 1
        if calls == {killed_at} + 1:
            os.kill(os.getpid(), 9)
    return real(self, target)
pathlib.Path.replace = replace
apply(pathlib.Path({str(site.root)!r}), pathlib.Path({str(patches)!r}))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert status(site.root, patches).state is State.INTERRUPTED

    if operation == "apply":
        apply(site.root, patches)
        assert site.snapshot() == {**RELEASED, **PATCHED}
    else:
        revert(site.root, patches)
        assert site.snapshot() == RELEASED


def test_stale_bytecode_of_changed_files_is_removed(site: FakeSite, patches: Path) -> None:
    site.write("sglang/srt/other.py", b"x = 1\n")
    compiled = [
        Path(py_compile.compile(str(site.root / path), optimize=level))
        for path in ("sglang/srt/other.py", "sglang/__init__.py")
        for level in (0, 2)
    ]
    stale = (site.root / "sglang/srt/__pycache__/scheduler.cpython-312.pyc", site.root / "sglang/srt/__pycache__/x.pyc")
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")

    apply(site.root, patches)

    assert not stale[0].exists()
    assert stale[1].exists()
    assert all(path.exists() for path in compiled)


def test_edited_patches_replace_the_ones_that_are_applied(site: FakeSite, patches: Path) -> None:
    apply(site.root, patches)
    (patches / "series").write_text("01-first.patch\n")
    (patches / "02-second.patch").unlink()
    first = (patches / "01-first.patch").read_bytes()
    (patches / "01-first.patch").write_bytes(first.replace(b"+line five", b"+line FIVE"))
    write_lock(site.root, patches)
    assert status(site.root, patches).state is State.OUTDATED

    apply(site.root, patches)

    snapshot = site.snapshot()
    assert b"line FIVE\n" in snapshot[SCHEDULER]
    assert b"inserted" not in snapshot[SCHEDULER]
    assert snapshot["sglang/srt/no_newline.py"] == RELEASED["sglang/srt/no_newline.py"]
    assert CREATED not in snapshot
    assert status(site.root, patches).state is State.APPLIED
    revert(site.root, patches)
    assert site.snapshot() == RELEASED


def test_patches_edited_without_a_new_lock_are_refused(site: FakeSite, patches: Path) -> None:
    second = (patches / "02-second.patch").read_bytes()
    (patches / "02-second.patch").write_bytes(second.replace(b"+inserted", b"+INSERTED"))

    with pytest.raises(PatchError, match=r"sglang-0\.5\.23\.lock.*patch lock"):
        apply(site.root, patches)

    assert site.snapshot() == RELEASED


def test_a_patch_that_does_not_fit_is_named(site: FakeSite, patches: Path) -> None:
    first = (patches / "01-first.patch").read_bytes()
    (patches / "01-first.patch").write_bytes(first.replace(b"+line five", b"+line FIVE"))

    with pytest.raises(PatchError, match=r"02-second\.patch: sglang/srt/scheduler\.py: the hunk for line 4 does not"):
        apply(site.root, patches)

    assert site.snapshot() == RELEASED


def test_a_reinstalled_package_is_patched_again(site: FakeSite, patches: Path, tmp_path: Path) -> None:
    apply(site.root, patches)
    for path in PATCHED:
        if path in RELEASED:
            site.write(path, RELEASED[path])
    shutil.rmtree(site.root / "sglang/srt/extra")
    assert status(site.root, patches).state is State.CLEAN

    assert apply(site.root, patches).status.state is State.APPLIED


def test_a_package_that_is_not_there_is_refused(tmp_path: Path, patches: Path) -> None:
    with pytest.raises(PatchError, match="no installed sglang there"):
        apply(tmp_path, patches)


def test_the_lock_refuses_a_file_that_is_not_as_released(site: FakeSite, patches: Path) -> None:
    site.write(SCHEDULER, RELEASED[SCHEDULER] + b"# edited\n")
    before = (patches / "sglang-0.5.23.lock").read_bytes()

    with pytest.raises(PatchError, match=r"scheduler\.py: is not as sglang 0\.5\.23 released it"):
        write_lock(site.root, patches)

    assert (patches / "sglang-0.5.23.lock").read_bytes() == before


def test_the_lock_is_the_same_whether_written_from_a_clean_or_a_patched_package(site: FakeSite, patches: Path) -> None:
    lock = (patches / "sglang-0.5.23.lock").read_bytes()
    apply(site.root, patches)
    before = site.snapshot()

    write_lock(site.root, patches)

    assert (patches / "sglang-0.5.23.lock").read_bytes() == lock
    assert site.snapshot() == before


def test_the_lock_refuses_a_patch_that_does_not_say_why_it_exists(site: FakeSite, patches: Path) -> None:
    first = (patches / "01-first.patch").read_bytes()
    (patches / "01-first.patch").write_bytes(first.replace(b"Why: because\n  of something.\n", b""))

    with pytest.raises(PatchError, match=r"01-first\.patch: no `Why:`"):
        write_lock(site.root, patches)
