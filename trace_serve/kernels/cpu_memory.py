"""Memory by address in compiled functions.

An array costs a compiled function a microsecond to take and its slices cost reference counts; an address is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from trace_serve.kernels.cpu_stages import compiled


def emitted(function: Callable[..., Any]) -> Any:
    """`numba.extending.intrinsic`, as strict type checks want it."""
    return intrinsic(function)


@emitted
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@emitted
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line at an address, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), ir.IntType(32), ir.IntType(32), ir.IntType(32)])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
        read, keep, data = (ir.IntType(32)(value) for value in (0, 3, 1))
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled(types.void(int64, int64))
def fetch_ahead(address: Any, size: Any) -> None:
    """Asks for `size` bytes from an address on, which need not exist."""
    for at in range(0, size, 64):
        _prefetch(address + at)
