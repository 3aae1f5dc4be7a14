from __future__ import annotations

from pathlib import Path

import pytest
from fake_site import FIRST, RELEASED, SECOND, FakeSite, make_patch

from trace_serve.patching import write_lock


@pytest.fixture(scope="session")
def patch_texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("made") / "patches"
    directory.mkdir()
    make_patch(directory, "01-first.patch", RELEASED, FIRST)
    make_patch(directory, "02-second.patch", {**RELEASED, **FIRST}, SECOND)
    (directory / "series").write_text("# two topics\n01-first.patch\n02-second.patch  # builds on the first\n")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    return FakeSite(tmp_path / "site-packages")


@pytest.fixture
def patches(tmp_path: Path, patch_texts: dict[str, bytes], site: FakeSite) -> Path:
    """A locked patch directory for the fake site."""
    directory = tmp_path / "patches"
    directory.mkdir()
    for name, content in patch_texts.items():
        (directory / name).write_bytes(content)
    write_lock(site.root, directory)
    return directory
