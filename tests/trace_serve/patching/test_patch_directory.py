"""The series, the lock, and what is said when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_site import PATCHED, FakeSite

from trace_serve.errors import PatchError
from trace_serve.patching import status
from trace_serve.patching.series import check_headers, load_series
from trace_serve.patching.status import load_source

LOCK = "sglang-0.5.23.lock"


def test_comments_and_blank_lines_of_the_series_are_skipped(patches: Path) -> None:
    series = load_series(patches)

    assert [patch.name for patch in series.patches] == ["01-first.patch", "02-second.patch"]
    assert set(series.paths) == set(PATCHED)


def test_a_header_field_may_continue_on_the_next_line(patches: Path) -> None:
    series = load_series(patches)

    assert series.patches[0].header["Subject"] == "01-first.patch in short"
    assert series.patches[0].header["Why"] == "because of something."
    check_headers(series)


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("", "lists no patch"),
        ("01-first.patch\n01-first.patch\n", "distinct names"),
        ("../01-first.patch\n", "same directory"),
        ("01-first.patch\n", r"02-second\.patch is not listed"),
        ("01-first.patch\n02-second.patch\n03-third.patch\n", r"03-third\.patch: cannot be read"),
    ],
)
def test_a_bad_series_is_refused(patches: Path, series: str, message: str) -> None:
    (patches / "series").write_text(series)

    with pytest.raises(PatchError, match=message):
        load_series(patches)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("", "not a patch lock"),
        ("[]", "not a patch lock"),
        ('{"sglang": "0.5.23"}', "not a patch lock"),
        ('{"sglang": "0.5.23", "files": {"sglang/a.py": {"before": null, "after": "xyz"}}}', "SHA-256"),
        ('{"sglang": "0.5.22", "files": {}}', r"expected the name sglang-0\.5\.22\.lock"),
        ('{"sglang": "0.5.23", "files": {}}', "not in both the patches"),
    ],
)
def test_a_bad_lock_is_refused(patches: Path, damage: str, message: str) -> None:
    (patches / LOCK).write_text(damage)

    with pytest.raises(PatchError, match=message):
        load_source(patches)


def test_a_missing_or_second_lock_is_refused(patches: Path) -> None:
    (patches / "sglang-0.5.22.lock").write_text("{}")
    with pytest.raises(PatchError, match="expected exactly one"):
        load_source(patches)

    for lock in patches.glob("*.lock"):
        lock.unlink()
    with pytest.raises(PatchError, match="got lock files none"):
        load_source(patches)


def test_a_created_file_has_no_digest_before(patches: Path) -> None:
    files = json.loads((patches / LOCK).read_text())["files"]

    assert [path for path, file in files.items() if file["before"] is None] == ["sglang/srt/extra/created.py"]


def test_status_names_the_patches_of_each_file(site: FakeSite, patches: Path) -> None:
    site.write("sglang/srt/no_newline.py", PATCHED["sglang/srt/no_newline.py"])
    site.write("sglang/srt/windows.py", b"edited\n")

    shown = status(site.root, patches).to_dict()

    assert shown["state"] == "changed"
    assert {patch["name"]: patch["state"] for patch in shown["patches"]} == {
        "01-first.patch": "changed",
        "02-second.patch": "interrupted",
    }
    files = {file["path"]: file for file in shown["files"]}
    assert files["sglang/srt/scheduler.py"]["patches"] == ["01-first.patch", "02-second.patch"]
    assert files["sglang/srt/no_newline.py"]["state"] == "applied"
    assert files["sglang/srt/windows.py"]["state"] == "changed"
