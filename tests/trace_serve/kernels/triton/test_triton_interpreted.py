"""The kernels in Triton's interpreter equal the reference bit for bit. The interpreter is chosen when a kernel is
defined, hence the processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "cases", ["interpreted or TestRows", "TestRules", "TestFollow", "TestKV or TestExperts or TestAttention"]
)
def test_kernels_equal_the_reference_in_the_interpreter(cases):
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-k", cases]
    # numpy warns where fp32 arithmetic overflows or divides by zero on purpose.
    command += ["-W", "ignore::RuntimeWarning", str(here / "interpreted_run.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
