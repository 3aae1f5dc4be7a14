"""Compiles what the launch functions would launch, for a GPU that is not there, and reads the machine code.

The launch functions run on CPU tensors; instead of launching, each kernel call is bound, specialized and compiled the
way Triton's runtime would for the given compute capability. So the arguments, the specialization and the options are
the ones a card would get.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from trace_serve.kernels.triton import _jit

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Machine:
    """Machine code of one kernel.

    Attributes:
        ptx, sass: its text.
        registers: 32-bit registers a thread.
        stack: bytes of local memory a thread; anything but 0 is a spill.
        shared: bytes of shared memory a program.
    """

    name: str
    ptx: str
    sass: str
    registers: int
    stack: int
    shared: int

    def count(self, pattern: str) -> int:
        """How often a regular expression occurs in the PTX."""
        return len(re.findall(pattern, self.ptx))

    def count_sass(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))

    @property
    def barriers(self) -> int:
        return self.count(r"bar\.sync|barrier\.sync")


def _machine(name: str, compiled: Any, directory: Path) -> Machine:
    cubin = directory / f"{name}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [_TOOLS / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    sass = subprocess.run([_TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Machine(name, compiled.asm["ptx"], sass, int(registers), int(stack), compiled.metadata.shared)


@contextmanager
def compiling_for(capability: int, directory: Path) -> Iterator[list[Machine]]:
    """Within it, launches for CPU tensors append their machine code to the list (90, 100 or 103)."""
    target = GPUTarget("cuda", capability, 32)
    backend = CUDABackend(target)
    compiled: list[Machine] = []

    def run(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        kwargs["debug"] = False
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        _, signature, constants, attrs = self._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(self, signature, constants, attrs)
        options = {key: value for key, value in options.items() if key not in bound}
        compiled.append(_machine(self.fn.__name__, triton.compile(source, target=target, options=options), directory))

    # FlashInfer points Triton at the machine's own ptxas when it is imported; figures must not depend on that.
    own_tools = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_PTXAS")}
    level = _jit.level_of((capability // 10, capability % 10))
    with (
        mock.patch.dict(os.environ, own_tools, clear=True),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(_jit, "device_level", return_value=level),
        triton.knobs.cache.scope(),
    ):
        triton.knobs.cache.dir = str(directory / "cache")
        yield compiled


def machine_of(call: Callable[[], object], capability: int, directory: Path) -> Machine:
    """The machine code of the one kernel that `call` launches."""
    with compiling_for(capability, directory) as compiled:
        call()
    (machine,) = compiled
    return machine
