"""The CPU backend: single-pass loops compiled by numba, bit-exact with `trace_serve.nvfp4`.

numba, because it comes with SGLang, needs no compiler at installation, and emits the vector instructions of the
machine it runs on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trace_serve.errors import RecipeError, ShapeError
from trace_serve.kernels import cpu_decode, cpu_loops, cpu_stages
from trace_serve.kernels.checks import check_codes, check_pool, check_rows, static_arithmetic
from trace_serve.nvfp4 import PORTABLE_RULES, Quantized, Rules, new_counters
from trace_serve.nvfp4.global_scale import pow2_fraction_and_bias
from trace_serve.recipe import BLOCK, E2M1_MAX, SCALE_FORMULAS


class CpuKernels:
    name = "cpu"

    def implements(self, rules: Rules) -> bool:
        return not (rules.four_over_six or rules.square_tiles)

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
        return self._run(x, rules, rotation, global_scale, encode_scale, hints, counters, None)

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
        return values, self._run(x, rules, rotation, global_scale, encode_scale, hints, counters, values)

    def _run(
        self,
        x: Tensor,
        rules: Rules,
        rotation: int,
        global_scale: float | None,
        encode_scale: float | None,
        hints: bool,
        counters: Tensor | None,
        values: Tensor | None,
    ) -> Quantized:
        check_rows(x, rotation, global_scale, encode_scale)
        if x.device.type != "cpu":
            raise ShapeError(f"x: is on {x.device}, expected the CPU", field="x")
        if not self.implements(rules):
            raise RecipeError(
                "recipe: the CPU kernels compute neither 4over6 nor 16x16 tiles; quantize these with nvfp4.quantize",
                field="four_over_six" if rules.four_over_six else "weight_tiles",
            )
        rows, k = x.shape
        codes = torch.empty((rows, k // 2), dtype=torch.uint8)
        scales = torch.empty((rows, k // BLOCK), dtype=torch.uint8)
        g = torch.empty(rows, dtype=torch.float32)
        words = torch.empty((rows, k // BLOCK), dtype=torch.uint16) if hints else None
        counters = _checked(counters)
        if x.numel() == 0:
            return Quantized(codes, scales, g.fill_(global_scale or 1.0), words)
        # The loops see addresses, so that what they point to has to be held here.
        held = x.detach().contiguous()
        if held.dtype == torch.float16:
            held = held.to(torch.float32)
        fraction, bias = pow2_fraction_and_bias(rules.scale_max)
        scale, encode, decode = static_arithmetic(1.0 if global_scale is None else global_scale, encode_scale)
        cpu_loops.quantize_rows(
            held.data_ptr(),
            rows,
            k,
            held.element_size(),
            rotation,
            np.float32(1.0 / math.sqrt(rotation) if rotation else 1.0),
            cpu_loops.STATIC if global_scale is not None else cpu_loops.TOKEN_SCALES[rules.token_scale],
            np.float32(scale),
            np.float32(encode),
            np.float32(decode),
            fraction,
            bias,
            np.float32(E2M1_MAX * rules.scale_max),
            SCALE_FORMULAS.index(rules.scale_formula),
            cpu_stages.ZERO_BLOCKS.index(rules.zero_block),
            rules.reciprocal == "divide",
            rules.ties == "up",
            codes.data_ptr(),
            scales.data_ptr(),
            g.data_ptr(),
            0 if words is None else words.data_ptr(),
            0 if values is None else values.data_ptr(),
            counters.data_ptr(),
        )
        return Quantized(codes, scales, g, words)

    def gather_dequantize(self, codes: Tensor, scales: Tensor, index: Tensor, global_scale: float) -> Tensor:
        check_pool(codes, scales, index)
        slots, heads, half = codes.shape
        out = torch.empty((index.shape[0], heads, half * 2), dtype=torch.bfloat16)
        pool, pool_scales, places = codes.contiguous(), scales.contiguous(), index.to(torch.int64).contiguous()
        bad = cpu_decode.gather_dequantize(
            pool.data_ptr(),
            pool_scales.data_ptr(),
            slots,
            heads * half * 2,
            places.data_ptr(),
            places.shape[0],
            np.float32(global_scale),
            out.data_ptr(),
        )
        if bad >= 0:
            raise IndexError(f"index[{bad}]: slot {int(index[bad])} is outside the pool of {slots}")
        return out

    def hint_bits(self, codes: Tensor) -> Tensor:
        check_codes(codes)
        out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK), dtype=torch.uint16)
        cpu_stages.hint_words(codes.contiguous().view(-1).numpy().view(np.uint64), out.view(-1).numpy())
        return out


def _checked(counters: Tensor | None) -> Tensor:
    """Counters whose memory the loops may write to."""
    if counters is None:
        return new_counters()
    good = counters.dtype == torch.int64 and counters.shape == (3,) and counters.is_contiguous()
    if not good or counters.device.type != "cpu":
        raise ShapeError(
            f"counters: got {counters.dtype} {tuple(counters.shape)} on {counters.device}, expected contiguous int64 "
            "[3] on the CPU",
            field="counters",
        )
    return counters


KERNELS = CpuKernels()
