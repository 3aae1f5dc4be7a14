"""Outcomes of quantizing expert inputs, kept by KV slot.

A slot's row is written in the same forward pass that writes the slot's K and V, so rows follow the KV cache through
prefix hits, chunked prefill and slot re-use without any bookkeeping of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import BLOCK

NEVER_WRITTEN = -1


@dataclass(frozen=True)
class ExpertInputRows:
    """Rows of one request.

    Attributes:
        bits: uint16 [T, L, H/16], lowest bit of every code.
        scales: uint8 [T, L, H/16], E4M3 bytes.
        global_log2: int8 [T, L], exponent of the per-token global scale.
        present: bool [T], every layer of the row was written by the weights now loaded.
    """

    bits: Tensor
    scales: Tensor
    global_log2: Tensor
    present: Tensor


class SlotVersions:
    """The weight version under which each KV slot was last written.

    Args:
        slots: KV slots of the pool, the padding slot included.
    """

    def __init__(self, slots: int) -> None:
        self._version = torch.full((slots,), NEVER_WRITTEN, dtype=torch.int32)

    def mark(self, slots: Tensor, version: int) -> None:
        self._version[slots] = version

    def present(self, slots: Tensor, version: int) -> Tensor:
        """bool [T]: the slot was written under `version`."""
        return self._version[slots] == version


class ExpertInputSlots:
    """Host memory for `slots` tokens: (3 * hidden / 16 + 1) bytes and one version a layer and slot.

    Args:
        slots: KV slots of the pool, the padding slot included.
        layers: global indices of the layers whose experts are quantized, ascending.
        hidden: hidden size, a multiple of 16.
    """

    def __init__(self, slots: int, layers: tuple[int, ...], hidden: int) -> None:
        blocks = hidden // BLOCK
        self.layers = layers
        self._row = {layer: i for i, layer in enumerate(layers)}
        self._bits = torch.zeros(len(layers), slots, blocks, dtype=torch.uint16)
        self._scales = torch.zeros(len(layers), slots, blocks, dtype=torch.uint8)
        self._global_log2 = torch.zeros(len(layers), slots, dtype=torch.int8)
        self._version = torch.full((len(layers), slots), NEVER_WRITTEN, dtype=torch.int32)

    def store(self, layer: int, slots: Tensor, quantized: Quantized, version: int) -> None:
        """Writes the rows of one forward pass.

        Args:
            layer: global layer index, one of `layers`.
            slots: int64 [N].
            quantized: N rows in the order of `slots`, with hints and a power-of-two global scale a row.
            version: of the weights that computed the rows.
        """
        assert quantized.hints is not None
        i = self._row[layer]
        # uint16 has no index_put kernel on a CPU; int16 views share the memory.
        self._bits[i].view(torch.int16)[slots] = quantized.hints.view(torch.int16)
        self._scales[i][slots] = quantized.scales
        self._global_log2[i][slots] = _exponent(quantized.global_scale)
        self._version[i][slots] = version

    def read(self, slots: Tensor, version: int) -> ExpertInputRows:
        """Copies the rows of the given slots (int64 [T]); rows of another weight version are not present."""
        present = (self._version[:, slots] == version).all(dim=0)
        return ExpertInputRows(
            bits=self._bits.view(torch.int16)[:, slots].transpose(0, 1).contiguous().view(torch.uint16),
            scales=self._scales[:, slots].transpose(0, 1).contiguous(),
            global_log2=self._global_log2[:, slots].transpose(0, 1).contiguous(),
            present=present,
        )


def _exponent(scale: Tensor) -> Tensor:
    """log2 of powers of two in fp32, as int8."""
    return ((scale.view(torch.int32) >> 23) - 127).to(torch.int8)
