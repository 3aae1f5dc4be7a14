"""The CPU backend: single-pass loops compiled by numba, bit-exact with `trace_serve.nvfp4`.

numba, because it comes with SGLang, needs no compiler at installation, and emits the vector instructions of the
machine it runs on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.kernels import cpu_loops, cpu_stages
from trace_serve.kernels.checks import check_codes, check_pool, check_rows
from trace_serve.nvfp4 import PORTABLE_RULES, Quantized, Rules, new_counters
from trace_serve.recipe import BLOCK


class CpuKernels:
    name = "cpu"

    def implements(self, rules: Rules) -> bool:
        return rules == PORTABLE_RULES

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
        return self._run(x, rotation, global_scale, hints, counters, None)

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
        values = torch.empty(x.shape, dtype=torch.bfloat16)
        return values, self._run(x, rotation, global_scale, hints, counters, values)

    def _run(
        self,
        x: Tensor,
        rotation: int,
        global_scale: float | None,
        hints: bool,
        counters: Tensor | None,
        values: Tensor | None,
    ) -> Quantized:
        check_rows(x, rotation, global_scale)
        if x.device.type != "cpu":
            raise ShapeError(f"x: is on {x.device}, expected the CPU", field="x")
        rows, k = x.shape
        codes = torch.empty((rows, k // 2), dtype=torch.uint8)
        scales = torch.empty((rows, k // BLOCK), dtype=torch.uint8)
        g = torch.empty(rows, dtype=torch.float32)
        bits = torch.empty((rows if hints else 0, k // BLOCK), dtype=torch.uint16)
        out = values if values is not None else torch.empty((0, k), dtype=torch.bfloat16)
        x = x.detach().contiguous()
        cpu_loops.quantize_rows(
            x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.to(torch.float32).numpy(),
            rotation,
            np.float32(1.0 / math.sqrt(rotation) if rotation else 1.0),
            np.float32(global_scale or 0.0),
            codes.numpy(),
            scales.numpy(),
            g.numpy(),
            bits.numpy(),
            out.view(torch.uint16).numpy(),
            (new_counters() if counters is None else counters).numpy(),
        )
        return Quantized(codes, scales, g, bits if hints else None)

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        check_pool(codes, scales, index)
        slots, heads, half = codes.shape
        out = torch.empty((index.shape[0], heads, half * 2), dtype=torch.bfloat16)
        flat_codes = codes if codes.is_contiguous() else codes.contiguous()
        flat_scales = scales if scales.is_contiguous() else scales.contiguous()
        bad = cpu_loops.gather_dequantize(
            flat_codes.view(slots, heads * half).numpy(),
            flat_scales.view(slots, heads * half * 2 // BLOCK).numpy(),
            index.to(torch.int64).numpy(),
            np.float32(global_scale),
            out.view(index.shape[0], heads * half * 2).view(torch.uint16).numpy(),
        )
        if bad >= 0:
            raise IndexError(f"index[{bad}]: slot {int(index[bad])} is outside the pool of {slots}")
        return out

    def hint_bits(self, codes: Tensor) -> Tensor:
        check_codes(codes)
        out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK), dtype=torch.uint16)
        cpu_stages.hint_words(codes.contiguous().view(-1).numpy().view(np.uint64), out.view(-1).numpy())
        return out


KERNELS = CpuKernels()
