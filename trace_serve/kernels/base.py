"""What a backend of the NVFP4 kernels offers, and the registry of backends (imported lazily)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from trace_serve.errors import ConfigError
from trace_serve.nvfp4 import PORTABLE_RULES, Quantized, Rules


class Kernels(Protocol):
    """Row-wise NVFP4 operations under the rules that a backend implements; `kernels_for` serves every recipe.

    Every backend gives the codes and scale bytes of `trace_serve.nvfp4`, bit for bit.
    """

    name: str

    def implements(self, rules: Rules) -> bool:
        """Whether the row operations below take these rules."""
        ...

    def quantize_rows(
        self,
        x: Tensor,
        *,
        rules: Rules = PORTABLE_RULES,
        rotation: int = 0,
        global_scale: float | None = None,
        encode_scale: float | None = None,
        hints: bool = False,
        counters: Tensor | None = None,
    ) -> Quantized:
        """Rotates and quantizes each row.

        Args:
            x: bfloat16 or float32 [N, K], K a multiple of 16; N may be 0.
            rules: the recipe's rules of the operand, which the backend has to implement.
            rotation: width of the Hadamard rotation applied first; 0 is off.
            global_scale: one static scale, or None for the one that the rules take from each rotated row.
            encode_scale: S beside a static scale, where the recipe starts from it (`nvfp4.GlobalScale.encode`); the
                arithmetic then uses S and 1/S, and the static scale is only kept.
            hints: whether to return the lowest bit of every code too, from the same pass.
            counters: int64 [3], incidents are added in place (`nvfp4.INCIDENT_NAMES`).

        Returns:
            `Quantized` with codes [N, K/2], scales [N, K/16], global_scale fp32 [N] and, if asked for, hints [N, K/16].

        Raises:
            ShapeError: wrong rank or dtype, or K not a multiple of 16 or of the rotation width.
            RecipeError: rules that the backend does not implement.
        """
        ...

    def fake_quantize_rows(
        self,
        x: Tensor,
        *,
        rules: Rules = PORTABLE_RULES,
        rotation: int = 0,
        global_scale: float | None = None,
        encode_scale: float | None = None,
        hints: bool = False,
        counters: Tensor | None = None,
    ) -> tuple[Tensor, Quantized]:
        """`quantize_rows` and the values it keeps, as bfloat16 [N, K], in one pass."""
        ...

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        """Reads rows of a quantized KV pool.

        Args:
            codes: uint8 [slots, heads, D/2].
            scales: uint8 [slots, heads, D/16], E4M3 bytes.
            index: int32 or int64 [n], slots to read.
            global_scale: the pool's static scale.

        Returns:
            bfloat16 [n, heads, D].

        Raises:
            ShapeError: shapes or dtypes that do not fit each other.
            IndexError: a slot outside the pool.
        """
        ...

    def hint_bits(self, codes: Tensor) -> Tensor:
        """The lowest bit of every code: uint8 [..., K/2] to uint16 [..., K/16], bit i = value i of the block.

        Raises:
            ShapeError: another dtype, or K not a multiple of 16.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """Where a backend is implemented and on which device types it can run."""

    name: str
    module: str
    device_types: tuple[str, ...]
    requires: tuple[str, ...] = ()


BACKENDS = (
    Backend("cpu", "trace_serve.kernels.cpu", ("cpu",), requires=("numba",)),
    Backend("triton", "trace_serve.kernels.triton", ("cuda",), requires=("triton",)),
    Backend("reference", "trace_serve.kernels.reference", ("cpu", "cuda")),
)
"""In order of preference."""


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run on a device; `reason` says why not and is empty when it can."""

    name: str
    usable: bool
    reason: str


def _check(backend: Backend, device_type: str) -> Availability:
    if device_type not in backend.device_types:
        reason = f"runs on {', '.join(backend.device_types)}, not on {device_type}"
        return Availability(backend.name, False, reason)
    for module in backend.requires:
        try:
            importlib.import_module(module)
        except ImportError as exc:
            return Availability(backend.name, False, f"needs {module}: {exc}")
    return Availability(backend.name, True, "")


def available(device: torch.device | str = "cpu") -> list[Availability]:
    """Every known backend in order of preference, with the reason where it cannot run on `device`."""
    device_type = torch.device(device).type
    return [_check(backend, device_type) for backend in BACKENDS]


@cache
def _load(name: str) -> Kernels:
    module = next(backend.module for backend in BACKENDS if backend.name == name)
    return cast(Kernels, importlib.import_module(module).KERNELS)


def get_kernels(name: str = "auto", device: torch.device | str = "cpu") -> Kernels:
    """The backend of that name, or with `auto` the first one that can run on `device`.

    Raises:
        ConfigError: unknown name, or the backend cannot run here.
    """
    states = available(device)
    if name == "auto":
        usable = [state.name for state in states if state.usable]
        if usable:
            return _load(usable[0])
        raise ConfigError(f"kernels: no backend runs on {device}: {_describe(states)}", field="kernels")
    for state in states:
        if state.name == name:
            if state.usable:
                return _load(name)
            raise ConfigError(f"kernels: backend {name!r} cannot run on {device}: {state.reason}", field="kernels")
    known = ", ".join(state.name for state in states)
    raise ConfigError(f"kernels: got {name!r}, expected auto or one of {known}", field="kernels")


def _describe(states: list[Availability]) -> str:
    return "; ".join(f"{state.name} {state.reason}" for state in states)
