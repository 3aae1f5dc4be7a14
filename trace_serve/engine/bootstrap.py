"""What must happen in an engine process before SGLang's heavy modules are imported.

Called by the patched `sglang/__init__.py` in every process, spawned children included.
"""

from __future__ import annotations

import importlib
import os
import sys


def prepare() -> None:
    """On the CPU engine, makes `sgl_kernel` importable where the CUDA build cannot load.

    A working `sgl_kernel` (a CPU build, say) is left alone.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "sgl_kernel" in sys.modules:
        return
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError, RuntimeError):
        for name in [n for n in sys.modules if n == "sgl_kernel" or n.startswith("sgl_kernel.")]:
            del sys.modules[name]
        from trace_serve.engine import cpu_fallback

        cpu_fallback.install()
