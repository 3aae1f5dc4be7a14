"""The backend made of `trace_serve.nvfp4` itself: any device, no compilation, the slowest."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.kernels.checks import check_codes, check_pool, check_rows
from trace_serve.nvfp4 import PORTABLE_RULES, Quantized, Rules


class ReferenceKernels:
    name = "reference"

    def implements(self, rules: Rules) -> bool:
        return True

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
        check_rows(x, rotation, global_scale, encode_scale)
        rotated = nvfp4.rotate(x, rotation)
        g: Tensor | float
        if global_scale is None:
            scale = nvfp4.row_global_scale(rotated, rules)
            g, encode = scale.decode, scale.encode
        else:
            g = global_scale
            encode = None if encode_scale is None else torch.full(x.shape[:1], encode_scale, device=x.device)
        kept = nvfp4.quantize_under(rotated, g, rules, encode_scale=encode, counters=counters)
        kept = dataclasses.replace(kept, global_scale=kept.global_scale.expand(x.shape[0]).contiguous())
        return dataclasses.replace(kept, hints=nvfp4.hint_bits(kept.codes)) if hints else kept

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
        quantized = self.quantize_rows(
            x,
            rules=rules,
            rotation=rotation,
            global_scale=global_scale,
            encode_scale=encode_scale,
            hints=hints,
            counters=counters,
        )
        return nvfp4.dequantize(quantized, torch.bfloat16), quantized

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        check_pool(codes, scales, index)
        g = torch.full((), global_scale, dtype=torch.float32, device=codes.device)
        return nvfp4.dequantize(Quantized(codes[index], scales[index], g), torch.bfloat16)

    def hint_bits(self, codes: Tensor) -> Tensor:
        check_codes(codes)
        return nvfp4.hint_bits(codes)


KERNELS = ReferenceKernels()
