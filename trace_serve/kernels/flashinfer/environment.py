"""The environment variables that decide how FlashInfer's own quantizers round.

FlashInfer 0.7.2 reads them at every call, not when it is imported or compiles a kernel: `getenv` in the C++ launchers
(`csrc/nv_internal/cpp/common/envUtils.cpp`, which accept either of the two), `os.environ` in the CuTe DSL quantizers
(`quantization/nvfp4_quantization_utils.py`, which know the first alone). Only the string "1" counts as set. So setting
them late would work from then on, but what this process quantized before would be rounded otherwise: once FlashInfer is
imported they are verified, never changed.
"""

from __future__ import annotations

import os
import sys

from trace_serve.errors import ConfigError

EXACT_MATH = ("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH")
"""Must be 1: otherwise reciprocals are `rcp.approx.ftz`, which no other backend can repeat."""

FOUR_OVER_SIX = "FLASHINFER_NVFP4_4OVER6"
"""Must not be 1: it makes the quantizers search two scales a block, whatever the recipe says."""


def exact_math_problem() -> str:
    """What is wrong with the environment in one line that names the variable; empty if nothing is."""
    for name in EXACT_MATH:
        value = os.environ.get(name)
        if value != "1":
            got = "not set" if value is None else repr(value)
            return f"{name}: is {got}, expected 1 for exact math; set it before the engine starts"
    if os.environ.get(FOUR_OVER_SIX) == "1":
        return f"{FOUR_OVER_SIX}: is 1, expected unset; a recipe chooses 4over6 with four_over_six"
    return ""


def require_exact_math() -> None:
    """Sets the variables that are missing if FlashInfer was not imported yet, and verifies all of them.

    Raises:
        ConfigError: a variable has another value, or is missing although FlashInfer is already imported. `field` names
            it.
    """
    if "flashinfer" not in sys.modules:
        for name in EXACT_MATH:
            os.environ.setdefault(name, "1")
    problem = exact_math_problem()
    if problem:
        raise ConfigError(problem, field=problem.partition(":")[0])
