"""The backend made of `trace_serve.nvfp4` itself: any device, no compilation, the slowest."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.kernels.checks import check_codes, check_pool, check_rows
from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import Recipe

_RECIPE = Recipe()


class ReferenceKernels:
    name = "reference"

    def quantize_rows(
        self,
        x: Tensor,
        *,
        rotation: int = 0,
        global_scale: float | None = None,
        hints: bool = False,
        counters: Tensor | None = None,
    ) -> Quantized:
        check_rows(x, rotation, global_scale)
        rotated = nvfp4.rotate(x, rotation)
        if global_scale is None:
            quantized = nvfp4.quantize_tokens(rotated, _RECIPE, counters=counters)
        else:
            g = torch.full((x.shape[0],), global_scale, dtype=torch.float32, device=x.device)
            quantized = nvfp4.quantize(rotated, g, _RECIPE, counters=counters)
        return dataclasses.replace(quantized, hints=nvfp4.hint_bits(quantized.codes)) if hints else quantized

    def fake_quantize_rows(
        self,
        x: Tensor,
        *,
        rotation: int = 0,
        global_scale: float | None = None,
        hints: bool = False,
        counters: Tensor | None = None,
    ) -> tuple[Tensor, Quantized]:
        quantized = self.quantize_rows(x, rotation=rotation, global_scale=global_scale, hints=hints, counters=counters)
        return nvfp4.dequantize(quantized, torch.bfloat16), quantized

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        check_pool(codes, scales, index)
        g = torch.tensor(global_scale, dtype=torch.float32, device=codes.device)
        return nvfp4.dequantize(Quantized(codes[index], scales[index], g), torch.bfloat16)

    def hint_bits(self, codes: Tensor) -> Tensor:
        check_codes(codes)
        return nvfp4.hint_bits(codes)


KERNELS = ReferenceKernels()
