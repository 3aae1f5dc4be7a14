"""Checks that the safetensors files of a model directory are complete, reading their headers only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trace_serve.errors import PolicyError
from trace_serve.policy.tokenizer import read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
_MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: its file's name, dtype as the header spells it, and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _BITS[self.dtype] // 8


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        PolicyError: no such file, a header that cannot be parsed, or a file shorter or longer than its header says.
    """

    def damaged(what: str) -> PolicyError:
        return PolicyError(f"{path}: {what}; the shard is truncated or altered, copy it again", field=path.name)

    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise damaged(f"{size} bytes cannot hold a header of {length} bytes")
            raw = json.loads(handle.read(length))
    except OSError as exc:
        raise PolicyError(f"{path}: cannot be read ({exc.strerror})", field=path.name) from exc
    except ValueError as exc:
        raise damaged("its header is not JSON") from exc
    if not isinstance(raw, dict):
        raise damaged("its header is not a JSON object")
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, entry in raw.items():
        if name == "__metadata__":
            continue
        info, begin, stop = _parse_entry(path.name, entry)
        if info is None or stop - begin != info.nbytes:
            raise damaged(f"its header describes tensor {name!r} inconsistently")
        tensors[name] = info
        end = max(end, stop)
    if 8 + length + end != size:
        raise damaged(f"it has {size} bytes, its header says {8 + length + end}")
    return tensors


def _parse_entry(file: str, entry: Any) -> tuple[TensorInfo | None, int, int]:
    try:
        begin, stop = (int(offset) for offset in entry["data_offsets"])
        info = TensorInfo(file, entry["dtype"], tuple(int(n) for n in entry["shape"]))
    except (KeyError, TypeError, ValueError):
        return None, 0, 0
    if info.dtype not in _BITS or begin < 0 or any(n < 0 for n in info.shape):
        return None, 0, 0
    return info, begin, stop


def read_weights(directory: Path | str) -> dict[str, TensorInfo]:
    """Every tensor of a model directory, by name.

    Raises:
        PolicyError: no weights; an index that names a missing shard or a tensor that is not in its shard; a tensor in
            two shards; a shard that the index does not name; a damaged shard.
    """
    root = Path(directory)
    shards = sorted(path.name for path in root.glob("*.safetensors"))
    if not shards:
        raise PolicyError(f"{root}: no weights, expected {SINGLE_FILE} or {INDEX_FILE} and its shards", field="weights")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(root / shard).items():
            if name in tensors:
                raise PolicyError(
                    f"{root}: tensor {name!r} is in {tensors[name].file} and in {shard}, expected it once", field=shard
                )
            tensors[name] = info
    if (root / INDEX_FILE).is_file():
        _check_index(root, shards, tensors)
    elif shards != [SINGLE_FILE]:
        raise PolicyError(
            f"{root}: {len(shards)} shards without {INDEX_FILE}; add the index or save the model again",
            field=INDEX_FILE,
        )
    return tensors


def _check_index(root: Path, shards: list[str], tensors: dict[str, TensorInfo]) -> None:
    weight_map = read_json_object(root / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise PolicyError(f"{root / INDEX_FILE}: no weight_map object", field=INDEX_FILE)
    for shard in sorted({str(file) for file in weight_map.values()}):
        if shard not in shards:
            raise PolicyError(f"{root}: shard {shard} is named by {INDEX_FILE} and missing", field=shard)
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != shard:
            raise PolicyError(f"{root}: tensor {name!r} is not in {shard} as {INDEX_FILE} says", field=INDEX_FILE)
    for name, info in tensors.items():
        if name not in weight_map:
            raise PolicyError(f"{root}: tensor {name!r} of {info.file} is not in {INDEX_FILE}", field=INDEX_FILE)
