"""The variables that make FlashInfer's quantizers exact: when set, when refused, when read."""

import os
import re
import subprocess
import sys

import pytest
import torch
from flashinfer_library import load

from trace_serve.errors import ConfigError
from trace_serve.kernels.flashinfer import available, exact_math_problem, reason, require_exact_math
from trace_serve.kernels.flashinfer.availability import capability_reason
from trace_serve.kernels.flashinfer.environment import EXACT_MATH, FOUR_OVER_SIX

_FRESH = """
import os, sys
from trace_serve.errors import ConfigError
from trace_serve.kernels.flashinfer import require_exact_math
assert "flashinfer" not in sys.modules
try:
    require_exact_math()
    print([os.environ[name] for name in sys.argv[1:]])
except ConfigError as exc:
    print(exc.field, exc)
"""


def fresh(**variables: str) -> str:
    base = {k: v for k, v in os.environ.items() if k not in (*EXACT_MATH, FOUR_OVER_SIX)}
    run = subprocess.run(
        [sys.executable, "-c", _FRESH, *EXACT_MATH], env=base | variables, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_the_backend_does_not_import_flashinfer_and_missing_variables_are_set():
    assert fresh() == "['1', '1']"


def test_a_variable_with_another_value_is_refused_by_name_even_before_flashinfer_is_imported():
    assert fresh(**{EXACT_MATH[0]: "0"}).startswith(f"{EXACT_MATH[0]} {EXACT_MATH[0]}: is '0', expected 1")
    assert fresh(**{FOUR_OVER_SIX: "1"}).startswith(f"{FOUR_OVER_SIX} ")


@pytest.fixture
def imported(monkeypatch):
    """FlashInfer imported, and both variables set."""
    load("flashinfer")
    for name in EXACT_MATH:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(FOUR_OVER_SIX, raising=False)
    return monkeypatch


def test_variables_that_are_set_pass(imported):
    require_exact_math()
    assert exact_math_problem() == ""


@pytest.mark.parametrize("name", EXACT_MATH)
def test_a_missing_variable_is_refused_by_name_once_flashinfer_is_imported(imported, name):
    imported.delenv(name)
    with pytest.raises(ConfigError, match=rf"^{name}: is not set, expected 1") as caught:
        require_exact_math()
    assert caught.value.field == name
    assert name not in os.environ


@pytest.mark.parametrize("value", ["0", "true", "", "1 "])
def test_only_the_string_1_counts_as_it_does_for_flashinfer(imported, value):
    imported.setenv(EXACT_MATH[0], value)
    with pytest.raises(ConfigError, match=re.escape(repr(value))):
        require_exact_math()
    assert not load("flashinfer.quantization.nvfp4_quantization_utils").env_flag_enabled(EXACT_MATH[0])


def test_flashinfer_reads_the_variable_at_each_call(imported):
    enabled = load("flashinfer.quantization.nvfp4_quantization_utils").env_flag_enabled
    assert enabled(EXACT_MATH[0])
    imported.setenv(EXACT_MATH[0], "0")
    assert not enabled(EXACT_MATH[0])


def test_flashinfers_launchers_read_either_variable_at_each_call(imported):
    package = load("flashinfer.jit.env").FLASHINFER_CSRC_DIR
    source = (package / "nv_internal/cpp/common/envUtils.cpp").read_text()
    body = re.search(r"getEnvDisableFP4QuantFastMath\(\) \{(.*?)\n\}", source, re.DOTALL).group(1)
    assert "static" not in body
    assert all(f'getBoolEnv("{name}")' in body for name in EXACT_MATH)


# Availability.


def test_a_cpu_is_refused_in_the_words_of_the_registry():
    state = available("cpu")
    assert (state.name, state.usable, state.reason) == ("flashinfer", False, "runs on cuda, not on cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is visible")
def test_a_missing_card_is_said_to_be_missing():
    assert reason("cuda") == "needs a CUDA device: none is visible"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 7), (12, 0)])
def test_cards_other_than_sm_100_and_sm_103_are_refused_by_their_capability(capability):
    assert capability_reason(capability) == f"needs sm_100 or sm_103, not sm_{capability[0]}{capability[1]}"


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_sm_100_and_sm_103_can_run_it(capability):
    assert capability_reason(capability) == ""
