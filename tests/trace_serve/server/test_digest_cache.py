"""A directory's digest is computed once, and again as soon as anything in it may have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trace_serve.policy.digest import digest_directory
from trace_serve.server.policies import digests
from trace_serve.server.policies.digests import DigestCache


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    (directory / "deep").mkdir(parents=True)
    (directory / "a.bin").write_bytes(b"one")
    (directory / "deep" / "b.bin").write_bytes(b"two")
    return directory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories whose bytes were read."""
    seen: list[Path] = []

    def counted(path: Path) -> str:
        seen.append(path)
        return digest_directory(path)

    monkeypatch.setattr(digests, "digest_directory", counted)
    return seen


def test_an_unchanged_directory_is_read_once_even_by_another_process(
    directory: Path, tmp_path: Path, reads: list[Path]
) -> None:
    cache = DigestCache(tmp_path / "digests.json")
    expected = digest_directory(directory)
    assert [cache.lookup(directory) for _ in range(3)] == [expected] * 3
    assert DigestCache(tmp_path / "digests.json").lookup(directory) == expected
    assert reads == [directory]


def edited_in_place(directory: Path) -> None:
    """The same size, and the time of writing put back."""
    path = directory / "a.bin"
    before = path.stat()
    path.write_bytes(b"1ne")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(directory: Path) -> None:
    (directory / "new.bin").write_bytes(b"one")
    (directory / "new.bin").replace(directory / "a.bin")


def added(directory: Path) -> None:
    (directory / "deep" / "c.bin").write_bytes(b"")


def removed(directory: Path) -> None:
    (directory / "deep" / "b.bin").unlink()


@pytest.mark.parametrize("change", [edited_in_place, replaced, added, removed])
def test_every_change_is_noticed(directory: Path, reads: list[Path], change: Callable[[Path], None]) -> None:
    cache = DigestCache()
    cache.lookup(directory)
    change(directory)
    assert cache.lookup(directory) == digest_directory(directory)
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"x": ["only one"]}'])
def test_a_damaged_cache_file_is_computed_again(directory: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "digests.json").write_text(content)
    assert DigestCache(tmp_path / "digests.json").lookup(directory) == digest_directory(directory)
