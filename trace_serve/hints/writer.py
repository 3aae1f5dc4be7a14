"""Writing a hint file part by part; the bytes are those that `wire.to_bytes` gives for the whole."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.encode import metadata_of, pack_mask, tensors_of
from trace_serve.hints.rows import HintFile

_MASK = ".present"
_COPY_BYTES = 1 << 20


class HintWriter:
    """Appends parts of one trajectory to a file that appears complete or not at all.

    Keeps token ids and masks in memory, a few bytes a row, and nothing else.

    Args:
        path: the file.
        rows: rows of the whole.
        scale: `lsb`, `byte` or `none`, as in `wire.to_bytes`.
        experts: number of routed experts a layer, where parts have routed experts; it decides how wide ids are.

    Raises:
        OSError: the directory is missing or full.
    """

    def __init__(self, path: Path | str, rows: int, *, scale: str = "lsb", experts: int | None = None) -> None:
        self._path = Path(path)
        self._rows, self._scale, self._experts = rows, scale, experts
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        self._body: BinaryIO = self._temporary.with_suffix(".body").open("w+b")
        self._first: HintFile | None = None
        self._last_token: int | None = None
        self._placed: list[container.Placed] = []
        self._masks: dict[str, list[NDArray[np.bool_]]] = {}
        self._ids: list[NDArray[np.int32]] = []
        self._spans: list[list[Any]] = []
        self._written = 0

    def append(self, part: HintFile) -> None:
        """Adds the rows that follow those written so far.

        Raises:
            HintFormatError: the part has other sites, layers or extras than the first, is not the next one, is of
                another recipe, or has more rows than are left.
        """
        first = self._first or part
        self._check_next(first, part)
        arrays = self._widened(tensors_of(part, self._scale))
        if self._first is None:
            self._first = _without_rows(part)
            shapes = {name: (array.dtype, (self._length(name), *array.shape[1:])) for name, array in arrays.items()}
            self._placed = container.place(shapes)
        if {name: array.shape[1:] for name, array in arrays.items()} != {p.name: p.shape[1:] for p in self._placed}:
            raise HintFormatError("part: has other tensors or shapes than the first part", field="tensors")
        for placed in self._placed:
            array = arrays[placed.name]
            if placed.name.endswith(_MASK):
                bits = np.unpackbits(array, bitorder="little", count=part.rows).astype(np.bool_)
                self._masks.setdefault(placed.name, []).append(bits)
                continue
            row_bytes = placed.size // self._rows if self._rows else 0
            self._body.seek(placed.begin + self._written * row_bytes)
            self._body.write(np.ascontiguousarray(array, dtype=placed.dtype).tobytes())
        self._ids.append(part.token_ids)
        self._add_spans(part)
        self._written += part.rows
        self._last_token = part.next_token_id

    def close(self) -> None:
        """Writes what is left and puts the file in place.

        Raises:
            HintFormatError: fewer rows were written than were announced.
            OSError: the disk is full; nothing is left behind.
        """
        try:
            if self._first is None or self._written != self._rows:
                raise HintFormatError(f"rows: got {self._written}, expected {self._rows}", field="rows")
            for name, pieces in self._masks.items():
                placed = next(each for each in self._placed if each.name == name)
                self._body.seek(placed.begin)
                self._body.write(pack_mask(np.concatenate(pieces)).tobytes())
            self._body.flush()
            checksums = {placed.name: self._checksum(placed) for placed in self._placed}
            header = container.header_bytes(self._placed, checksums, self._metadata(self._first))
            with self._temporary.open("wb") as out:
                out.write(header)
                self._body.seek(0)
                shutil.copyfileobj(self._body, out, _COPY_BYTES)
            self._temporary.replace(self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Drops what was written and is not in place yet."""
        self._body.close()
        for leftover in (self._temporary, Path(self._body.name)):
            leftover.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _metadata(self, first: HintFile) -> dict[str, str]:
        metadata = metadata_of(dataclasses.replace(first, next_token_id=self._last_token), self._scale)
        ids = np.concatenate(self._ids)
        return {
            **metadata,
            "rows": str(self._rows),
            "weight_versions": container.canonical(self._spans),
            "token_ids_digest": "sha256:" + hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest(),
        }

    def _check_next(self, first: HintFile, part: HintFile) -> None:
        if (part.recipe_id, part.model_digest) != (first.recipe_id, first.model_digest):
            raise HintFormatError("part: is of another recipe or model than the first part", field="recipe_id")
        expected = first.first_token + self._written
        if part.first_token != expected:
            raise HintFormatError(
                f"part first_token: got {part.first_token}, expected {expected}, where the last part ended",
                field="first_token",
            )
        if self._written + part.rows > self._rows:
            raise HintFormatError(
                f"part: {part.rows} rows behind {self._written} are more than the {self._rows} announced", field="rows"
            )
        described = [metadata_of(each, self._scale)["sites"] for each in (first, part)]
        if described[0] != described[1]:
            raise HintFormatError("part: has other sites, layers or scales than the first part", field="sites")

    def _widened(self, arrays: container.Arrays) -> container.Arrays:
        """Ids of routed experts in the width that the whole file needs."""
        routed = arrays.get("routed_experts")
        if routed is None or self._experts is None or self._experts <= 0xFF or routed.dtype != np.uint8:
            return arrays
        wide = np.where(routed == 0xFF, 0xFFFF, routed.astype(np.uint16)).astype(np.uint16)
        return {**arrays, "routed_experts": wide}

    def _length(self, name: str) -> int:
        return (self._rows + 7) // 8 if name.endswith(_MASK) else self._rows

    def _add_spans(self, part: HintFile) -> None:
        for begin, end, version in part.weight_versions:
            if self._spans and self._spans[-1][2] == version and self._spans[-1][1] == self._written + begin:
                self._spans[-1][1] = self._written + end
            else:
                self._spans.append([self._written + begin, self._written + end, version])

    def _checksum(self, placed: container.Placed) -> str:
        digest = hashlib.sha256()
        self._body.seek(placed.begin)
        left = placed.size
        while left:
            chunk = self._body.read(min(left, _COPY_BYTES))
            if not chunk:
                raise OSError(f"{self._path}: {left} bytes of {placed.name} were not written")
            digest.update(chunk)
            left -= len(chunk)
        return digest.hexdigest()


def _without_rows(hints: HintFile) -> HintFile:
    """The same description with no rows, so that nothing large is kept."""
    sites = tuple(
        dataclasses.replace(
            site,
            bits=site.bits[:0],
            codes=None if site.codes is None else site.codes[:0],
            scales=None if site.scales is None else site.scales[:0],
            present=site.present[:0],
            global_log2=None if site.global_log2 is None else site.global_log2[:0],
            global_scale=None if site.global_scale is None else site.global_scale[:0],
        )
        for site in hints.sites
    )
    return HintFile(
        token_ids=hints.token_ids[:0],
        sites=sites,
        recipe_id=hints.recipe_id,
        model_digest=hints.model_digest,
        weight_versions=(),
        first_token=hints.first_token,
    )
