"""The Transformer Engine quantizer with hints keeps the rollout's codes in Transformer Engine's own layout.

The package does not install without CUDA, so a quantizer with its methods and layout stands in for the reference; that
the methods are those is what `test_plug_contracts` checks.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trace_serve.errors import ConfigError
from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.plugs import transformer_engine as plug
from trace_serve.nvfp4 import dequantize, hint_bits, quantize_tokens, unpack_values
from trace_serve.recipe import Recipe

RECIPE = Recipe()
PACKAGE = "transformer_engine.pytorch.custom_recipes"


class Reference:
    """Row-wise zeros where the reference would have its own codes; column-wise marks that must come through."""

    def __init__(self, dtype: str, row_scaled_nvfp4: bool = False) -> None:
        self.dtype, self.row_scaled_nvfp4 = dtype, row_scaled_nvfp4

    def _quantize(self, tensor: Tensor) -> tuple[Any, ...]:
        rows, columns = tensor.shape
        codes = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        scales = torch.zeros(rows, columns // 16).to(torch.float8_e4m3fn)
        return codes, scales, "codes_t", "scales_t", torch.ones(1), "amax_t"


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, formats = ModuleType(f"{PACKAGE}.reference_nvfp4"), ModuleType(f"{PACKAGE}.reference_utils")
    reference.__dict__["NVFP4QuantizerRef"] = Reference
    formats.__dict__["Fp4Formats"] = SimpleNamespace(E2M1="e2m1")
    parts = PACKAGE.split(".")
    for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (reference, formats):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plug.quantizer_class.cache_clear()


def role(module: str, tensor: str) -> Any:
    return SimpleNamespace(module_type=module, tensor_type=tensor, name="")


def rows_of(seed: int, count: int = 6) -> tuple[Tensor, Tensor, Outcomes]:
    """Trainer's rows, what the rollout kept of its own, and the hints that tell."""
    rollout = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    trainer = (rollout.float() * 1.003).bfloat16()
    kept = quantize_tokens(rollout, RECIPE)
    outcomes = Outcomes(hint_bits(kept.codes), kept.scales & 1, "lsb", kept.global_scale.expand(count))
    return trainer, dequantize(kept, torch.float32), outcomes


def values(quantizer: Any, x: Tensor) -> Tensor:
    """As `NVFP4QuantizerRef.qgemm` reads one operand: values x scales x amax / (6 * 448)."""
    codes, scales, *_, amax, _ = quantizer._quantize(x)
    per_block = scales.float().repeat_interleave(16, dim=1)
    return unpack_values(codes) * per_block * (amax.reshape(-1, 1) / (6 * 448))


def test_staged_inputs_are_what_the_rollout_kept() -> None:
    first, kept, outcomes = rows_of(1)
    quantizers = [plug.quantizer_factory(role("grouped_linear", "input")) for _ in range(3)]
    plug.stage(quantizers, [4, 0, 2], outcomes, RECIPE)
    assert torch.equal(values(quantizers[0], first[:4]), kept[:4])
    assert torch.equal(values(quantizers[2], first[4:]), kept[4:])


def test_hints_are_used_once_and_the_column_wise_image_is_the_references() -> None:
    x, _, outcomes = rows_of(1)
    quantizer = plug.quantizer_factory(role("linear", "input"))
    plug.stage([quantizer], [6], outcomes, RECIPE)
    codes, _, codes_t, scales_t, _, amax_t = quantizer._quantize(x)
    assert codes.any()
    assert (codes_t, scales_t, amax_t) == ("codes_t", "scales_t", "amax_t")
    assert not quantizer._quantize(x)[0].any()


@pytest.mark.parametrize("other", [None, role("grouped_linear", "weight"), role("linear", "grad_output"), role("", "")])
def test_other_tensors_get_the_reference(other: Any) -> None:
    assert type(plug.quantizer_factory(other)) is Reference


def test_one_scale_for_several_tokens_scales_is_refused() -> None:
    x, _, outcomes = rows_of(1)
    scales = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    quantizer = plug.quantizer_class()("e2m1", row_scaled_nvfp4=False)
    different = Outcomes(outcomes.bits, outcomes.scales, "lsb", scales)
    plug.stage([quantizer], [6], different, RECIPE)
    with pytest.raises(ConfigError, match="row_scaled_nvfp4"):
        quantizer._quantize(x)
    with pytest.raises(ConfigError, match="splits: got 5 rows"):
        plug.stage([quantizer], [5], outcomes, RECIPE)


def test_megatrons_token_numbers_become_rows_sequence_by_sequence() -> None:
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, -1])
    assert plug.batch_rows(tokens, 2, 3).tolist() == [0, 3, 1, 4, 2, 5, -1]
