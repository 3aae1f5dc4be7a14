"""What a rollout's quantizer decided about a tensor, as its hints tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.recipe import BLOCK

ScaleKind = Literal["lsb", "byte", "none"]


@dataclass(frozen=True)
class Outcomes:
    """Decisions for a tensor [..., K], K a multiple of 16.

    Attributes:
        bits: uint16 or int32 [..., K/16]; bit i of block b is the lowest bit of the code of value 16 * b + i.
        scales: uint8 [..., K/16], the E4M3 bytes of the blocks or their lowest bits; None where `scale_kind` is `none`.
        scale_kind: what `scales` holds.
        global_scale: fp32, broadcastable to [...]; None takes the trainer's own.
        present: bool [...]; rows without outcomes are rounded to nearest. None means all have them.
        codes: uint8 [..., K] with every code, for a full replay; the bits are then not needed.
    """

    bits: Tensor
    scales: Tensor | None = None
    scale_kind: ScaleKind = "lsb"
    global_scale: Tensor | None = None
    present: Tensor | None = None
    codes: Tensor | None = None

    def check(self, x: Tensor) -> None:
        """Refuses outcomes of another tensor.

        Raises:
            ShapeError: naming the field.
        """
        blocks = (*x.shape[:-1], x.shape[-1] // BLOCK)
        _expect("bits", self.bits, (torch.uint16, torch.int32), blocks)
        if (self.scales is None) != (self.scale_kind == "none"):
            raise ShapeError(f"scales: given with scale_kind {self.scale_kind!r}", field="scales")
        if self.scales is not None:
            _expect("scales", self.scales, (torch.uint8,), blocks)
        if self.present is not None:
            _expect("present", self.present, (torch.bool,), tuple(x.shape[:-1]))
        if self.codes is not None:
            _expect("codes", self.codes, (torch.uint8,), tuple(x.shape))


def unpack_bits(bits: Tensor) -> Tensor:
    """uint16 (or int32) [..., B] to uint8 0 or 1 [..., 16 * B], lowest bit first."""
    wide = bits.to(torch.int32)
    shifts = torch.arange(BLOCK, dtype=torch.int32, device=bits.device)
    return ((wide.unsqueeze(-1) >> shifts) & 1).to(torch.uint8).reshape(*bits.shape[:-1], bits.shape[-1] * BLOCK)


def _expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        raise ShapeError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {dtypes[0]} {shape}", field=name)
