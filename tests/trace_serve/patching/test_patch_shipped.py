"""The shipped patches against the SGLang of this environment, on a copy of the files they touch."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from trace_serve.patching import apply, patch_dir, revert
from trace_serve.patching.series import check_headers
from trace_serve.patching.status import State, load_source
from trace_serve.patching.target import Target, find_target


@pytest.fixture
def copied(tmp_path: Path) -> Target:
    installed = find_target()
    for path in load_source(patch_dir()).series.paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(installed.root / path, tmp_path / path)
    (info,) = installed.root.glob(f"sglang-{installed.version}.dist-info")
    shutil.copytree(info, tmp_path / info.name)
    return find_target(tmp_path)


def test_every_patch_says_what_it_does_why_and_until_when() -> None:
    check_headers(load_source(patch_dir()).series)


def test_they_apply_to_the_release_and_revert_to_what_it_recorded(copied: Target) -> None:
    source = load_source(patch_dir())

    assert revert(copied.root).status.state is State.CLEAN
    for path in source.series.paths:
        assert hashlib.sha256((copied.root / path).read_bytes()).hexdigest() == copied.released_digests[path]

    assert apply(copied.root).status.state is State.APPLIED
    for path, locked in source.lock.files.items():
        assert hashlib.sha256((copied.root / path).read_bytes()).hexdigest() == locked.after
        compile((copied.root / path).read_text(encoding="utf-8"), path, "exec")
