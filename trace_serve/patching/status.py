"""What state the installed files are in, file by file, told by their digests alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from trace_serve.errors import PatchError
from trace_serve.patching.lock import Lock, digest, find_lock, load_lock
from trace_serve.patching.series import Series, load_series
from trace_serve.patching.target import Target, find_target, patch_dir

RECORD = ".trace-serve-patches"
"""Directory beside the package with a copy of the patches that were applied."""


class State(StrEnum):
    """State of one file, of one patch, or of the whole installation.

    CLEAN: as released. APPLIED: as the current patches make it. OUTDATED: as an earlier set of patches made it, known
    from the copy kept beside the package. CHANGED: none of these. INTERRUPTED: several files, some clean, some applied
    or outdated.
    """

    CLEAN = "clean"
    APPLIED = "applied"
    OUTDATED = "outdated"
    CHANGED = "changed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class PatchSource:
    """A patch directory that was read: the series and its lock."""

    series: Series
    lock: Lock


@dataclass(frozen=True)
class FileStatus:
    path: str
    state: State
    digest: str | None
    patches: tuple[str, ...]


@dataclass(frozen=True)
class PatchStatus:
    name: str
    subject: str
    state: State
    files: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """State of an installation against the current patches."""

    root: Path
    version: str
    state: State
    patches: tuple[PatchStatus, ...]
    files: tuple[FileStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "root": str(self.root),
            "sglang": self.version,
            "state": self.state.value,
            "patches": [
                {"name": patch.name, "subject": patch.subject, "state": patch.state.value, "files": list(patch.files)}
                for patch in self.patches
            ],
            "files": [
                {"path": file.path, "state": file.state.value, "digest": file.digest, "patches": list(file.patches)}
                for file in self.files
            ],
        }


def load_source(directory: Path) -> PatchSource:
    """Reads a patch directory.

    Raises:
        PatchError: a patch or the lock is unusable, or they name different files.
    """
    source = PatchSource(series=load_series(directory), lock=load_lock(find_lock(directory)))
    differing = sorted(set(source.series.paths) ^ set(source.lock.files))
    if differing:
        raise PatchError(
            f"{directory}: {differing[0]} is not in both the patches and {source.lock.filename}; "
            "write the lock anew with `trace-serve patch lock`",
            field=source.lock.filename,
        )
    return source


def load_record(target: Target) -> PatchSource | None:
    """The patches that were applied last, or None when there is no usable copy of them for this release."""
    try:
        record = load_source(target.root / RECORD)
    except PatchError:
        return None
    return record if record.lock.sglang == target.version else None


def open_pair(target: Path | None, patches: Path | None) -> tuple[Target, PatchSource]:
    """The installation and the patches for it.

    Raises:
        PatchError: one of them is unusable, or the patches are for another release.
    """
    found = find_target(target)
    source = load_source(patches or patch_dir())
    if found.version != source.lock.sglang:
        raise PatchError(
            f"got sglang {found.version} in {found.root}, expected {source.lock.sglang}; "
            f"install it with `pip install sglang=={source.lock.sglang}`",
            field="target",
        )
    return found, source


def file_state(path: str, actual: str | None, source: PatchSource, record: PatchSource | None) -> State:
    """State of one file.

    Args:
        path: relative to the installation's root.
        actual: digest of the installed file, None when it does not exist.
        source: the current patches.
        record: the patches that were applied last.
    """
    current = source.lock.files.get(path)
    earlier = record.lock.files.get(path) if record else None
    if current is not None and actual == current.after:
        return State.APPLIED
    if earlier is not None and actual == earlier.after:
        return State.OUTDATED
    released = current or earlier
    return State.CLEAN if released is not None and actual == released.before else State.CHANGED


def overall(states: list[State]) -> State:
    """The state of several files together."""
    if State.CHANGED in states:
        return State.CHANGED
    if len(set(states)) == 1:
        return states[0]
    return State.INTERRUPTED if State.CLEAN in states else State.OUTDATED


def status(target: Path | None = None, patches: Path | None = None) -> Status:
    """Reads the state of an installation and changes nothing.

    Args:
        target: a site-packages directory; None means this Python environment.
        patches: a patch directory; None means the shipped patches.

    Raises:
        PatchError: SGLang is missing or of another release, or the patches are unusable.
    """
    found, source = open_pair(target, patches)
    return read_status(found, source, load_record(found))


def read_status(target: Target, source: PatchSource, record: PatchSource | None) -> Status:
    """As `status`, for an installation and patches that were read already."""
    names: dict[str, list[str]] = {}
    for patch in source.series.patches:
        for diff in patch.files:
            names.setdefault(diff.path, []).append(patch.name)
    files = []
    for path in dict.fromkeys([*source.series.paths, *(record.series.paths if record else ())]):
        actual = digest(target.read(path))
        state = file_state(path, actual, source, record)
        # A file that only an earlier set touched, and that is as released, is nobody's concern.
        if path in names or state is not State.CLEAN:
            files.append(FileStatus(path, state, actual, tuple(names.get(path, ()))))
    states = {file.path: file.state for file in files}
    per_patch = tuple(
        PatchStatus(
            name=patch.name,
            subject=patch.header.get("Subject", patch.name),
            state=overall([states[diff.path] for diff in patch.files]),
            files=tuple(diff.path for diff in patch.files),
        )
        for patch in source.series.patches
    )
    state = overall(list(states.values()))
    if state is State.INTERRUPTED and record is not None and record.lock != source.lock:
        state = State.OUTDATED
    return Status(target.root, target.version, state, per_patch, tuple(files))
