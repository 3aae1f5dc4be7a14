"""Safetensors files one tensor at a time, read and written, so that memory does not grow with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trace_serve.errors import PolicyError
from trace_serve.policy.weights import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""The dtypes of safetensors that checkpoints use."""
_ALIGNMENT = 8


class Shards:
    """The safetensors files of a directory, opened when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def read(self, name: str, info: TensorInfo, part: tuple[int | slice, ...] | None = None) -> Tensor:
        """One tensor, or the part of it that an index selects.

        Raises:
            PolicyError: its file cannot be read.
        """
        try:
            if info.file not in self._open:
                handle = safe_open(self._directory / info.file, framework="pt")
                self._open[info.file] = self._stack.enter_context(handle)
            shard = self._open[info.file]
            tensor: Tensor = shard.get_tensor(name) if part is None else shard.get_slice(name)[part]
        except (OSError, SafetensorError) as exc:
            raise PolicyError(f"{self._directory / info.file}: cannot be read: {exc}", field=info.file) from exc
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class ShardWriter:
    """A safetensors file whose tensors are known by name, dtype and shape before their data is.

    Tensors may be written in any order, each once. Wider dtypes lie first in the file, so that every tensor is aligned
    for its dtype, as in files that the safetensors library writes.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        order = sorted(tensors, key=lambda name: (-dtype_of(tensors[name]).itemsize, name))
        self._tensors = {name: tensors[name] for name in order}
        self._offsets: dict[str, int] = {}
        self._missing = set(order)
        self._write_header()

    def _write_header(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, info in self._tensors.items():
            self._offsets[name] = end
            header[name] = {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": [end, end + info.nbytes],
            }
            end += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._handle = self._path.open("wb")
        self._handle.write(len(text).to_bytes(8, "little") + text)
        self._base = self._handle.tell()
        self._handle.truncate(self._base + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor's data.

        Raises:
            ValueError: the tensor is not one that was announced, or not as it was.
        """
        info = self._tensors[name]
        if name not in self._missing or tensor.dtype != dtype_of(info) or tuple(tensor.shape) != info.shape:
            raise ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, announced {info}")
        self._handle.seek(self._base + self._offsets[name])
        self._handle.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self._missing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.close()
        if kind is None and self._missing:
            raise ValueError(f"{self._path}: tensor {min(self._missing)!r} was not written")


def dtype_of(info: TensorInfo) -> torch.dtype:
    """The torch dtype that a safetensors header names.

    Raises:
        PolicyError: one that weights of a served model do not have.
    """
    if info.dtype not in DTYPES:
        raise PolicyError(
            f"{info.file}: a tensor is {info.dtype}, expected one of {', '.join(DTYPES)}", field=info.file
        )
    return DTYPES[info.dtype]
