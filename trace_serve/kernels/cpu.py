"""The CPU backend: single-pass loops compiled by numba, bit-exact with `trace_serve.nvfp4`.

A decode step quantizes a few rows a layer, so what counts is the cost of a call: one compiled loop instead of some
thirty torch operations.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trace_serve.kernels import cpu_loops
from trace_serve.kernels.checks import check_pool, check_rows
from trace_serve.nvfp4 import Quantized, new_counters
from trace_serve.recipe import BLOCK


class CpuKernels:
    name = "cpu"

    def quantize_rows(
        self,
        x: Tensor,
        *,
        rotation: int = 0,
        global_scale: float | None = None,
        counters: Tensor | None = None,
    ) -> Quantized:
        return self._run(x, rotation, global_scale, counters, None)

    def fake_quantize_rows(
        self,
        x: Tensor,
        *,
        rotation: int = 0,
        global_scale: float | None = None,
        counters: Tensor | None = None,
    ) -> tuple[Tensor, Quantized]:
        values = torch.empty(x.shape, dtype=torch.bfloat16)
        return values, self._run(x, rotation, global_scale, counters, values)

    def _run(
        self, x: Tensor, rotation: int, global_scale: float | None, counters: Tensor | None, values: Tensor | None
    ) -> Quantized:
        check_rows(x, rotation, global_scale)
        rows, k = x.shape
        codes = torch.empty((rows, k // 2), dtype=torch.uint8)
        scales = torch.empty((rows, k // BLOCK), dtype=torch.uint8)
        g = torch.empty(rows, dtype=torch.float32)
        out = values if values is not None else torch.empty((0, k), dtype=torch.bfloat16)
        cpu_loops.quantize_rows(
            x.detach().to(torch.float32).contiguous().numpy(),
            rotation,
            np.float32(1.0 / math.sqrt(rotation) if rotation else 1.0),
            np.float32(global_scale or 0.0),
            codes.numpy(),
            scales.numpy(),
            g.numpy(),
            out.view(torch.uint16).numpy(),
            (new_counters() if counters is None else counters).numpy(),
        )
        return Quantized(codes, scales, g)

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        check_pool(codes, scales, index)
        out = torch.empty((index.shape[0], codes.shape[1], codes.shape[2] * 2), dtype=torch.bfloat16)
        bad = cpu_loops.gather_dequantize(
            codes.numpy(),
            scales.numpy(),
            index.to(torch.int64).numpy(),
            np.float32(global_scale),
            out.view(torch.uint16).numpy(),
        )
        if bad >= 0:
            raise IndexError(f"index[{bad}]: slot {int(index[bad])} is outside the pool of {codes.shape[0]}")
        return out

    def hint_bits(self, codes: Tensor) -> Tensor:
        flat = codes.contiguous().view(-1, BLOCK // 2)
        out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK), dtype=torch.uint16)
        cpu_loops.hint_bits(flat.numpy(), out.view(-1).numpy())
        return out


KERNELS = CpuKernels()
