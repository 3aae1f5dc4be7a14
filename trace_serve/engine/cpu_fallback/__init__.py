"""A stand-in for the compiled `sgl_kernel` on a machine where its CUDA build cannot load.

Torch implementations of what SGLang's CPU engine executes for the models of `docs/models.md`, and nothing else: every
other name that SGLang imports exists, so that its modules load, and raises when called.
"""

from __future__ import annotations

from trace_serve.engine.cpu_fallback.request_table import assign_req_to_token_pool_cpu
from trace_serve.engine.cpu_fallback.stand_in import install

__all__ = ["assign_req_to_token_pool_cpu", "install"]
