"""The safetensors container of a hint file: strict reading, and writing that gives the same bytes every time.

The container is written here and not by the safetensors package because its metadata comes out in a random order, and
read here because its reader returns no metadata from memory. Any safetensors reader opens the result.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError

Arrays = dict[str, NDArray[Any]]

DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 16 << 20
MAX_DIMENSIONS = 3
MAX_SIZE = 1 << 31
_METADATA = "__metadata__"
_TENSORS = "tensors"
_DIGEST = "metadata_sha256"


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse(text: str | bytes, what: str) -> Any:
    """JSON without repeated keys, NaN and halves of surrogate pairs.

    Raises:
        HintFormatError: naming `what`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a repeated key")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"the number {name}")

    try:
        # json would also take UTF-16 and UTF-32, which safetensors does not.
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        if "\\u" in text:
            # Half a surrogate pair is no character; other readers refuse it.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as exc:
        raise HintFormatError(f"hint file {what}: not JSON: {exc}; the file is damaged", field=what) from exc
    return value


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    rest = {key: value for key, value in metadata.items() if key != _DIGEST}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies behind the header: `size` bytes from `begin` on."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def place(tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> list[Placed]:
    """The tensors in the order of the file: wider types first, so that each starts at a multiple of its item size."""
    placed: list[Placed] = []
    begin = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        placed.append(Placed(name, dtype, shape, begin))
        begin += placed[-1].size
    return placed


def header_bytes(placed: Sequence[Placed], checksums: Mapping[str, str], metadata: Mapping[str, str]) -> bytes:
    """Everything before the first tensor.

    Args:
        placed: as `place` gives them.
        checksums: hex SHA-256 of each tensor's bytes, by name.
        metadata: without that of the tensors.
    """
    entries = {
        each.name: {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "sha256": checksums[each.name]}
        for each in placed
    }
    full = {**metadata, _TENSORS: canonical(entries)}
    header: dict[str, Any] = {_METADATA: {**full, _DIGEST: _metadata_digest(full)}}
    for each in placed:
        header[each.name] = {
            "dtype": _NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [each.begin, each.begin + each.size],
        }
    text = canonical(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a checksum of every tensor and of the metadata."""
    placed = place({name: (array.dtype, array.shape) for name, array in arrays.items()})
    payloads = [np.ascontiguousarray(arrays[each.name]).tobytes() for each in placed]
    checksums = {each.name: hashlib.sha256(data).hexdigest() for each, data in zip(placed, payloads, strict=True)}
    return b"".join((header_bytes(placed, checksums, metadata), *payloads))


def decode(data: bytes | mmap.mmap) -> tuple[Arrays, dict[str, str]]:
    """The tensors (read-only views of `data`) and metadata of a file that `encode` or an equal writer made.

    Raises:
        HintFormatError: a wrong length, trailing bytes, a header that is not what safetensors and version 1 allow, or
            a checksum that does not match.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER):
        raise HintFormatError(
            f"hint file: {len(data)} bytes cannot hold a header of {length} bytes; the file is cut or no hint file"
        )
    header = parse(data[8 : 8 + length], "header")
    if not isinstance(header, dict):
        raise HintFormatError("hint file header: not a JSON object; the file is no hint file", field="header")
    metadata = _metadata(header.pop(_METADATA, None))
    described = parse(metadata.pop(_TENSORS), _TENSORS)
    if not isinstance(described, dict) or set(described) != set(header):
        raise HintFormatError("hint file tensors: header and metadata name different tensors", field=_TENSORS)
    arrays: Arrays = {}
    spans: list[tuple[int, int]] = []
    body = memoryview(data)[8 + length :]
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(name, entry)
        expected = prod(shape) * dtype.itemsize
        if end - begin != expected or end > len(body):
            raise HintFormatError(
                f"hint file {name}: got {end - begin} bytes of {len(body)}, expected {expected} for {list(shape)}",
                field=name,
            )
        checksum = hashlib.sha256(body[begin:end]).hexdigest()
        if described[name] != {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": checksum}:
            raise HintFormatError(f"hint file {name}: wrong checksum, dtype or shape; the file is damaged", field=name)
        arrays[name] = np.frombuffer(body[begin:end], dtype=dtype).reshape(shape)
        spans.append((begin, end))
    _check_spans(spans, len(body))
    return arrays, metadata


def _metadata(raw: Any) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise HintFormatError("hint file: no metadata of strings; the file is no hint file", field="metadata")
    if _TENSORS not in raw or raw.get(_DIGEST) != _metadata_digest(raw):
        raise HintFormatError("hint file metadata: wrong checksum; the file is damaged or no hint file", field=_DIGEST)
    return {key: value for key, value in raw.items() if key != _DIGEST}


def _entry(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as exc:
        raise HintFormatError(f"hint file {name}: a bad header entry; the file is damaged", field=name) from exc
    usable = (
        all(type(n) is int and n >= 0 for n in numbers)
        and len(shape) <= MAX_DIMENSIONS
        and max(shape, default=0) < MAX_SIZE
    )
    if set(entry) != {"dtype", "shape", "data_offsets"} or not usable:
        raise HintFormatError(f"hint file {name}: a bad header entry; the file is damaged", field=name)
    return dtype, tuple(shape), begin, end


def _check_spans(spans: list[tuple[int, int]], size: int) -> None:
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise HintFormatError("hint file: tensors overlap or leave a gap; the file is damaged", field="header")
        end = stop
    if end != size:
        raise HintFormatError(f"hint file: {size - end} bytes after the last tensor, expected none", field="header")
