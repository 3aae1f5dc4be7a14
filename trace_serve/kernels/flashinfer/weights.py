"""Experts' NVFP4 weights in the layout of FlashInfer's CuTe DSL kernels.

The codes and scale bytes are those of our quantizers; only their order changes. Rows of w13 become up before gate,
interleaved in groups of 64, and scales become 128x4 tiles seen through FlashInfer's six-dimensional view. Hidden and
intermediate sizes are padded to multiples of 128 with zero codes under zero scales, gate and up separately, so that a
padded expert computes what the stand-alone product does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trace_serve.errors import ShapeError
from trace_serve.kernels.flashinfer import contract
from trace_serve.nvfp4 import Quantized, swizzle
from trace_serve.recipe import BLOCK

TILE = 128
"""Rows of a tile in both products, and the multiple of K that their scale tiles need."""
INTERLEAVE = 64
"""Rows of up, then of gate, that follow each other in w13."""


@dataclass(frozen=True)
class ExpertWeights:
    """Prepared weights of one layer; `_padded` sizes are multiples of 128.

    Attributes:
        w13: uint8 [E, 2 * intermediate_padded, hidden_padded/2], rows interleaved.
        w13_scales: uint8 [32, 4, rows/128, 4, K/64, E], a view of 128x4 tiles.
        w13_global: fp32 [E].
        w2: uint8 [E, hidden_padded, intermediate_padded/2].
        w2_scales: as `w13_scales`.
        w2_global: fp32 [E].
        hidden, intermediate: sizes of the model.
    """

    w13: Tensor
    w13_scales: Tensor
    w13_global: Tensor
    w2: Tensor
    w2_scales: Tensor
    w2_global: Tensor
    hidden: int
    intermediate: int

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_padded(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate_padded(self) -> int:
        return self.w2.shape[2] * 2

    @property
    def device(self) -> torch.device:
        return self.w13.device


def prepare_weights(w13: Quantized, w2: Quantized) -> ExpertWeights:
    """Reorders one layer's experts.

    Args:
        w13: codes uint8 [E, 2 * I, H/2], gate rows before up rows, scales uint8 [E, 2 * I, H/16]; global_scale fp32
            [E], or [E, 2 * I] with one value an expert.
        w2: codes uint8 [E, H, I/2], scales uint8 [E, H, I/16]; global_scale [E], or [E, H] alike.

    Raises:
        ShapeError: shapes or dtypes that do not fit each other, or rows of an expert with different global scales (a
            recipe with gate_up_scale 'split': the kernels take one factor an expert).
        EngineError: the installed FlashInfer is another one.
    """
    experts, rows, hidden = _check("w13", w13)
    w2_experts, w2_rows, intermediate = _check("w2", w2)
    if w2_experts != experts or w2_rows != hidden or rows != 2 * intermediate:
        raise ShapeError(
            f"w2: got {w2_experts} experts of [{w2_rows}, {intermediate}], expected {experts} of [{hidden}, "
            f"{rows // 2}] beside w13 of [{rows}, {hidden}]",
            field="w2",
        )
    more_rows, more_k = -intermediate % TILE, -hidden % TILE
    parts = [
        torch.stack([_padded(half, more_rows, more_k // per) for half in tensor.chunk(2, dim=1)][::-1], dim=1)
        for tensor, per in ((w13.codes, 2), (w13.scales, BLOCK))
    ]
    codes, scales = (_interleaved(part) for part in parts)
    return ExpertWeights(
        w13=codes,
        w13_scales=mma_scales(scales),
        w13_global=_one_an_expert("w13", w13.global_scale, experts),
        w2=_padded(w2.codes, more_k, more_rows // 2),
        w2_scales=mma_scales(_padded(w2.scales, more_k, more_rows // BLOCK)),
        w2_global=_one_an_expert("w2", w2.global_scale, experts),
        hidden=hidden,
        intermediate=intermediate,
    )


def mma_scales(scales: Tensor) -> Tensor:
    """Scales in row order, uint8 [groups, rows, K/16], as the view that the kernels address: tiles of 128x4."""
    groups, rows, columns = scales.shape
    view: Tensor = contract.MMA_SCALES(
        sf=swizzle(scales, "128x4").reshape(-1), m=rows, k=columns * BLOCK, num_groups=groups, sf_vec_size=BLOCK
    )
    return view


def _interleaved(parts: Tensor) -> Tensor:
    """[E, 2, I, X], up then gate, to [E, 2 * I, X] in groups of 64 rows."""
    experts, two, rows, width = parts.shape
    groups = parts.reshape(experts, two, rows // INTERLEAVE, INTERLEAVE, width)
    return groups.transpose(1, 2).reshape(experts, two * rows, width).contiguous()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return pad(x, (0, columns, 0, rows)).contiguous()


def _check(name: str, weight: Quantized) -> tuple[int, int, int]:
    codes, scales = weight.codes, weight.scales
    if codes.dtype != torch.uint8 or codes.dim() != 3 or codes.shape[2] % (BLOCK // 2):
        raise ShapeError(
            f"{name}: got codes {codes.dtype} {tuple(codes.shape)}, expected uint8 [E, N, K/2] with K a multiple of "
            f"{BLOCK}",
            field=name,
        )
    expected = (*codes.shape[:2], codes.shape[2] * 2 // BLOCK)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != expected:
        raise ShapeError(
            f"{name}: got scales {scales.dtype} {tuple(scales.shape)}, expected uint8 {expected}", field=name
        )
    return codes.shape[0], codes.shape[1], codes.shape[2] * 2


def _one_an_expert(name: str, g: Tensor, experts: int) -> Tensor:
    rows = g.reshape(experts, -1) if g.numel() and g.dim() and g.shape[0] == experts else None
    if rows is None or g.dtype != torch.float32:
        raise ShapeError(
            f"{name}: got global_scale {g.dtype} {tuple(g.shape)}, expected float32 [{experts}] or [{experts}, rows]",
            field=name,
        )
    if not bool((rows == rows[:, :1]).all()):
        raise ShapeError(
            f"{name}: an expert's rows have different global scales, which these kernels do not take; choose "
            "gate_up_scale 'shared'",
            field=name,
        )
    return rows[:, 0].contiguous()
