"""Hints of many requests without the rows that they share.

Requests that begin with the same prompt have the same rows for it. `merge` writes each such run of rows once:

    DIR/index.json                {"schema_version": 1, "trajectories": {name: [part, ...]}}
    DIR/parts/<sha256>.safetensors  a hint file of the run, named by its digest

A part is an ordinary hint file whose `first_token` is where it begins. `trajectory` puts one together again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.encode import metadata_of
from trace_serve.hints.reader import HintReader
from trace_serve.hints.rows import HintFile
from trace_serve.hints.wire import write_bytes
from trace_serve.hints.writer import HintWriter

INDEX = "index.json"
PARTS = "parts"
SCHEMA_VERSION = 1
MIN_SHARED_ROWS = 16
"""A shorter run is not worth a file of its own."""
_STEP = 256


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    Attributes:
        trajectories: how many.
        parts: files written.
        bytes_before, bytes_after: of all files.
    """

    trajectories: int
    parts: int
    bytes_before: int
    bytes_after: int


def merge(files: Mapping[str, Path], out: Path) -> Merged:
    """Writes trajectories without repeated prefixes.

    Args:
        files: hint files by the name of their trajectory.
        out: directory that does not exist yet.

    Raises:
        HintFormatError: a file is damaged, or `out` exists.
        OSError: the disk is full.
    """
    if out.exists():
        raise HintFormatError(f"--out: {out} exists, expected a new directory", field="out")
    (out / PARTS).mkdir(parents=True)
    fingerprints = {name: _fingerprints(path) for name, path in files.items()}
    index: dict[str, list[str]] = {}
    for name, path in files.items():
        cuts = _cuts(name, fingerprints)
        with HintReader(path) as reader:
            index[name] = [_write_part(reader, begin, end, out) for begin, end in pairwise(cuts)]
    content = {"schema_version": SCHEMA_VERSION, "trajectories": index}
    write_bytes(out / INDEX, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    parts = list((out / PARTS).iterdir())
    return Merged(
        trajectories=len(index),
        parts=len(parts),
        bytes_before=sum(path.stat().st_size for path in files.values()),
        bytes_after=sum(path.stat().st_size for path in parts) + (out / INDEX).stat().st_size,
    )


def names(directory: Path) -> list[str]:
    """Trajectories of a merged directory.

    Raises:
        HintFormatError: its index is missing or damaged.
    """
    return sorted(_index(directory))


def parts_of(directory: Path, name: str) -> Iterator[HintFile]:
    """The hints of a trajectory, run by run.

    Raises:
        HintFormatError: no such trajectory, or a part that is missing, damaged or another than its name says.
    """
    index = _index(directory)
    if name not in index:
        raise HintFormatError(f"trajectory {name!r}: not in {directory / INDEX}", field="trajectories")
    expected: int | None = None
    for part in index[name]:
        path = directory / PARTS / f"{part}.safetensors"
        if _digest(path) != part:
            raise HintFormatError(f"{path}: its digest is another than its name; it is damaged", field=str(path))
        with HintReader(path) as reader:
            if expected is not None and reader.first_token != expected:
                raise HintFormatError(
                    f"{path}: begins at {reader.first_token}, expected {expected}", field="first_token"
                )
            expected = reader.first_token + reader.total
            yield reader.rows(0, reader.total)


def trajectory(directory: Path, name: str, out: Path, *, scale: str | None = None) -> None:
    """Writes one trajectory as a hint file of its own, with the bytes that it had before the merge.

    Args:
        directory: of `merge`.
        name: the trajectory.
        out: the file.
        scale: as it was written; None reads it from the parts.

    Raises:
        HintFormatError: as `parts_of`.
    """
    rows = sum(part.rows for part in parts_of(directory, name))
    kind, experts = scale, None
    for part in parts_of(directory, name):
        kind = kind or _scale_kind(part)
        if part.routed_experts is not None and part.routed_experts.dtype == np.uint16:
            experts = 0xFFFF
    with HintWriter(out, rows, scale=kind or "lsb", experts=experts) as writer:
        for part in parts_of(directory, name):
            writer.append(part)


def _write_part(reader: HintReader, begin: int, end: int, out: Path) -> str:
    part = reader.rows(begin, end)
    if end < reader.total:
        part = replace(part, next_token_id=None)  # what follows is in the next part, and differs between siblings
    temporary = out / PARTS / f".part.{os.getpid()}"
    wide = part.routed_experts is not None and part.routed_experts.dtype == np.uint16
    with HintWriter(temporary, part.rows, scale=_scale_kind(part), experts=0xFFFF if wide else None) as writer:
        writer.append(part)
    digest = _digest(temporary)
    temporary.replace(out / PARTS / f"{digest}.safetensors")
    return digest


def _scale_kind(hints: HintFile) -> str:
    kinds = {site.scale_kind for site in hints.sites}
    if len(kinds) > 1:
        raise HintFormatError(
            f"scale: sites have {' and '.join(sorted(kinds))}, expected the same kind of scales at all of them",
            field="scale",
        )
    return kinds.pop() if kinds else "lsb"


def _fingerprints(path: Path) -> list[bytes]:
    """For each row a digest of everything up to and including it, so that equal prefixes have equal digests."""
    with HintReader(path) as reader:
        running = hashlib.sha256()
        found: list[bytes] = []
        for part in reader.parts(_STEP):
            kinds = metadata_of(part, _scale_kind(part))["sites"]
            description = repr((part.recipe_id, part.model_digest, kinds))
            if not found:
                running.update(repr((part.first_token, description)).encode())
            versions = [version for begin, end, version in part.weight_versions for _ in range(end - begin)]
            for row in range(part.rows):
                running.update(_row_bytes(part, row, versions[row]))
                found.append(running.digest())
    return found


def _row_bytes(part: HintFile, row: int, version: str) -> bytes:
    pieces: list[bytes] = [version.encode(), int(part.token_ids[row]).to_bytes(4, "little", signed=True)]
    following = part.token_ids[row + 1] if row + 1 < part.rows else part.next_token_id
    for site in part.sites:
        present = bool(site.present[row])
        pieces.append(bytes([present]))
        if present:
            arrays = (site.bits if site.codes is None else site.codes, site.scales, site.global_log2, site.global_scale)
            pieces += [array[row].tobytes() for array in arrays if array is not None]
    if part.logprobs is not None:
        # A log-probability is of the token that follows, which a sibling need not share.
        pieces += [part.logprobs[row].tobytes(), repr(following if not np.isnan(part.logprobs[row]) else None).encode()]
    if part.routed_experts is not None:
        known = part.routed_present is None or bool(part.routed_present[row])
        pieces.append(part.routed_experts[row].astype(np.int32).tobytes() if known else b"missing")
    return b"\0".join(pieces)


def _cuts(name: str, fingerprints: Mapping[str, list[bytes]]) -> list[int]:
    """Rows at which a trajectory is cut: the ends of what it shares with any other, and its own."""
    mine = fingerprints[name]
    shared = {_common(mine, other) for each, other in fingerprints.items() if each != name}
    cuts = [0]
    for cut in sorted(shared):
        if cut - cuts[-1] >= MIN_SHARED_ROWS and cut < len(mine):
            cuts.append(cut)
    return [*cuts, len(mine)]


def _common(first: list[bytes], second: list[bytes]) -> int:
    """Length of the common prefix; digests of prefixes are equal up to there and nowhere after."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _index(directory: Path) -> dict[str, list[str]]:
    path = directory / INDEX
    try:
        content: Any = container.parse(path.read_bytes(), INDEX)
        index = content["trajectories"]
        version = content["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise HintFormatError(f"{path}: cannot be read ({exc}); name a directory that `hints merge` wrote") from exc
    names_ok = isinstance(index, dict) and all(
        isinstance(parts, list) and all(isinstance(part, str) and part.isascii() and part.isalnum() for part in parts)
        for parts in index.values()
    )
    if type(version) is not int or version != SCHEMA_VERSION or not names_ok:
        raise HintFormatError(
            f"{path}: schema_version {version!r} or its contents cannot be used", field="schema_version"
        )
    return dict(index)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise HintFormatError(f"{path}: cannot be read ({exc.strerror})", field=str(path)) from exc
