"""The Triton backend as `kernels.base.Kernels`."""

from __future__ import annotations

from torch import Tensor

from trace_serve import nvfp4
from trace_serve.kernels.checks import check_codes, check_pool
from trace_serve.kernels.triton import block_rules
from trace_serve.kernels.triton.kv import gather_dequantize
from trace_serve.kernels.triton.quantize import quantize_rows
from trace_serve.nvfp4 import PORTABLE_RULES, Quantized, Rules


class TritonKernels:
    name = "triton"

    def implements(self, rules: Rules) -> bool:
        return block_rules.supports(rules)

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
        return quantize_rows(
            x,
            rules=rules,
            rotation=rotation,
            global_scale=global_scale,
            encode_scale=encode_scale,
            hints=hints,
            counters=counters,
        ).quantized

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
        out = quantize_rows(
            x,
            rules=rules,
            rotation=rotation,
            global_scale=global_scale,
            encode_scale=encode_scale,
            hints=hints,
            counters=counters,
            values=True,
        )
        assert out.values is not None
        return out.values, out.quantized

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        check_pool(codes, scales, index)
        return gather_dequantize(codes.contiguous(), scales.contiguous(), index.contiguous(), global_scale)

    def hint_bits(self, codes: Tensor) -> Tensor:
        check_codes(codes)
        return nvfp4.hint_bits(codes)


KERNELS = TritonKernels()
