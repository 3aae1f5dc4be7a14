"""Apply, revert, and write the lock.

Every file is first traced back to its released content, through the patches that made it what it is, and checked
against the digest of the release. Applying and reverting both start from there, so an installation that is clean,
patched, patched by an earlier set, or left half-way by a killed run all end in the same place.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trace_serve.errors import PatchError
from trace_serve.patching.lock import Lock, LockedFile, digest
from trace_serve.patching.series import check_headers, load_series
from trace_serve.patching.status import (
    RECORD,
    PatchSource,
    State,
    Status,
    file_state,
    load_record,
    open_pair,
    read_status,
)
from trace_serve.patching.target import Target, find_target, patch_dir
from trace_serve.patching.transaction import exclusive, remove_leftovers, replace_files


@dataclass(frozen=True)
class Outcome:
    """What was done: the files that were rewritten (none when there was nothing to do), and the state after it."""

    changed: tuple[str, ...]
    status: Status


def apply(target: Path | None = None, patches: Path | None = None) -> Outcome:
    """Brings the installed SGLang to the state that the patches describe; a second call changes nothing.

    Args:
        target: a site-packages directory; None means this Python environment.
        patches: a patch directory; None means the shipped patches.

    Raises:
        PatchError: another SGLang release, a file that someone else changed, or a lock that does not belong to the
            patches. Nothing is changed then.
    """
    found, source = open_pair(target, patches)
    with exclusive(found.root):
        record = load_record(found)
        contents = _read_clean(found, source, record)
        released = _released(found, source, record, contents)
        wanted = {path: _patched(path, released[path], source) for path in source.series.paths}
        changed = _write(found, contents, {**released, **wanted}, source, record)
        return Outcome(changed, read_status(found, source, source))


def revert(target: Path | None = None, patches: Path | None = None) -> Outcome:
    """Brings back the released files, byte for byte; a second call changes nothing.

    Raises:
        PatchError: as for `apply`.
    """
    found, source = open_pair(target, patches)
    with exclusive(found.root):
        record = load_record(found)
        contents = _read_clean(found, source, record)
        released = _released(found, source, record, contents)
        changes = _changes(contents, released)
        replace_files(found.root, changes)
        shutil.rmtree(found.root / RECORD, ignore_errors=True)
        return Outcome(tuple(changes), read_status(found, source, None))


def write_lock(target: Path | None = None, patches: Path | None = None) -> Path:
    """Writes the lock of a patch directory from an installed SGLang, patched or not; the installation stays as it is.

    The released content is checked against the digests that the installer recorded.

    Returns:
        The lock's path.

    Raises:
        PatchError: a patch lacks a header field or does not apply, or a file is not as released.
    """
    directory = patches or patch_dir()
    found = find_target(target)
    series = load_series(directory)
    check_headers(series)
    record = load_record(found)
    files = {}
    for path in series.paths:
        before = _traced_back(found, path, record)
        after = series.forward(path, before)
        if after == before:
            raise PatchError(f"{path}: the patches leave it as it is; remove them or make them change it", field=path)
        files[path] = LockedFile(before=digest(before), after=str(digest(after)))
    lock = Lock(sglang=found.version, files=files)
    destination = directory / lock.filename
    staged = destination.with_suffix(".lock.new")
    staged.write_text(lock.to_json(), encoding="utf-8")
    staged.replace(destination)
    return destination


def _read_clean(target: Target, source: PatchSource, record: PatchSource | None) -> dict[str, bytes | None]:
    paths = dict.fromkeys([*source.series.paths, *(record.series.paths if record else ())])
    remove_leftovers(target.root / path for path in paths)
    return {path: target.read(path) for path in paths}


def _released(
    target: Target, source: PatchSource, record: PatchSource | None, contents: Mapping[str, bytes | None]
) -> dict[str, bytes | None]:
    states = {path: file_state(path, digest(content), source, record) for path, content in contents.items()}
    for path, state in states.items():
        if state is State.CHANGED:
            fault = "is missing" if contents[path] is None else "was changed by something else"
            raise PatchError(
                f"{target.root / path}: {fault}, expected sglang {target.version} as released or as patched; "
                f"{target.remedy()}",
                field=path,
            )
    released = {}
    for path, content in contents.items():
        origin = {State.APPLIED: source, State.OUTDATED: record}.get(states[path])
        released[path] = content if origin is None or content is None else origin.series.backward(path, content)
        owner = source if path in source.lock.files else record
        if owner is not None and digest(released[path]) != owner.lock.files[path].before:
            raise _stale(path, owner)
    return released


def _patched(path: str, released: bytes | None, source: PatchSource) -> bytes:
    patched = source.series.forward(path, released)
    if digest(patched) != source.lock.files[path].after:
        raise _stale(path, source)
    return patched


def _stale(path: str, source: PatchSource) -> PatchError:
    name = source.lock.filename
    return PatchError(
        f"{path}: the patches do not lead from and to the digests in {name}; "
        "if you edited a patch, write the lock anew with `trace-serve patch lock`",
        field=name,
    )


def _changes(old: Mapping[str, bytes | None], new: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    return {path: content for path, content in new.items() if content != old[path]}


def _write(
    target: Target,
    old: Mapping[str, bytes | None],
    new: Mapping[str, bytes | None],
    source: PatchSource,
    record: PatchSource | None,
) -> tuple[str, ...]:
    changes = _changes(old, new)
    # Whatever a killed run leaves has to be traceable: a first copy is kept before the files change, a newer one
    # replaces it only after them.
    if record is None:
        _keep_record(target, source)
    try:
        replace_files(target.root, changes)
    except BaseException:
        if record is None:
            shutil.rmtree(target.root / RECORD, ignore_errors=True)
        raise
    if record is not None:
        _keep_record(target, source)
    return tuple(changes)


def _keep_record(target: Target, source: PatchSource) -> None:
    kept = target.root / RECORD
    staged = target.root / f"{RECORD}-new"
    directory = source.series.directory
    names = ["series", source.lock.filename, *(patch.name for patch in source.series.patches)]
    try:
        if kept.is_dir() and all(
            (kept / name).is_file() and (kept / name).read_bytes() == (directory / name).read_bytes() for name in names
        ):
            return
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        for name in names:
            shutil.copyfile(directory / name, staged / name)
        shutil.rmtree(kept, ignore_errors=True)
        staged.replace(kept)
    except OSError as exc:
        shutil.rmtree(staged, ignore_errors=True)
        raise PatchError(f"{kept}: cannot be written: {exc.strerror}", field="target") from exc


def _traced_back(target: Target, path: str, record: PatchSource | None) -> bytes | None:
    content = target.read(path)
    expected = target.released_digests.get(path)
    applied = record.lock.files.get(path) if record else None
    if record is not None and content is not None and applied is not None and digest(content) == applied.after:
        content = record.series.backward(path, content)
    if digest(content) != expected:
        raise PatchError(
            f"{target.root / path}: is not as sglang {target.version} released it; {target.remedy()}", field=path
        )
    return content
