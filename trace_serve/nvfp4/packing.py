"""Two E2M1 codes a byte, even index in the low nibble, and the hint bits that can be read from packed codes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import e2m1
from trace_serve.recipe import BLOCK


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] (0..15) to uint8 [..., K/2].

    Raises:
        ShapeError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise ShapeError(f"codes: last dimension is {codes.shape[-1]}, expected an even number", field="codes")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] to uint8 codes [..., K]."""
    pairs = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@cache
def _pair_values(device: torch.device) -> Tensor:
    every_byte = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    return e2m1.decode(unpack(every_byte.unsqueeze(-1)))


def unpack_values(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] to the fp32 E2M1 values [..., K], by one table lookup a byte."""
    pairs = _pair_values(packed.device)[packed.to(torch.int32)]
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@cache
def _bit_weights(device: torch.device) -> Tensor:
    return torch.tensor([1 << i for i in range(BLOCK)], dtype=torch.int32, device=device)


def hint_bits(packed: Tensor) -> Tensor:
    """The lowest bit of every code: uint8 [..., K/2] to uint16 [..., K/16], bit i = value i of the block.

    Raises:
        ShapeError: K is not a multiple of 16.
    """
    half = BLOCK // 2
    if packed.shape[-1] % half:
        raise ShapeError(
            f"codes: last dimension is {packed.shape[-1]} bytes, expected a multiple of {half}", field="codes"
        )
    lowest = (unpack(packed) & 1).to(torch.int32).reshape(*packed.shape[:-1], packed.shape[-1] // half, BLOCK)
    # uint16 has few kernels on some devices, so the word is built as int16 and reinterpreted.
    return (lowest * _bit_weights(packed.device)).sum(dim=-1, dtype=torch.int32).to(torch.int16).view(torch.uint16)
