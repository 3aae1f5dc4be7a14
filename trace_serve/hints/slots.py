"""Outcomes of quantizing expert inputs, kept by KV slot.

A slot's row is written in the same forward pass that writes the slot's K and V, so rows follow the KV cache through
prefix hits, chunked prefill and slot re-use without any bookkeeping of requests. What proves it is the number of that
pass, kept with the slot and with every layer's row: a row that another pass wrote is a missing row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.nvfp4 import Quantized, hint_bits
from trace_serve.recipe import BLOCK

NEVER_WRITTEN = -1


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one request.

    Attributes:
        bits: uint16 [T, L, G * values / 16], lowest bit of every code.
        codes: uint8 [T, L, G * values / 2], where they are kept; None elsewhere.
        scales: uint8 [T, L, G * values / 16], E4M3 bytes.
        global_log2: int8 [T, L, G], exponent of the per-token global scale.
        present: bool [T], every layer of the row was written by the pass that wrote the slot.
    """

    bits: Tensor
    scales: Tensor
    global_log2: Tensor
    present: Tensor
    codes: Tensor | None = None


class SlotPasses:
    """The forward pass and the weight version under which each KV slot was last written.

    Args:
        slots: KV slots of the pool, the padding slot included.
    """

    def __init__(self, slots: int) -> None:
        self._pass = torch.full((slots,), NEVER_WRITTEN, dtype=torch.int64)
        self._version = torch.full((slots,), NEVER_WRITTEN, dtype=torch.int32)

    def mark(self, slots: Tensor, number: int, version: int) -> None:
        """Records that forward pass `number` writes the slots (int64 [N]) with weights of `version`."""
        self._pass[slots] = number
        self._version[slots] = version

    def numbers(self, slots: Tensor) -> Tensor:
        """int64 [T], the pass that last wrote each slot, or NEVER_WRITTEN."""
        return self._pass[slots]

    def versions(self, slots: Tensor) -> Tensor:
        """int32 [T], the weight version under which each slot was last written, or NEVER_WRITTEN."""
        return self._version[slots]


class ExpertSlots:
    """Host memory of one site: G * (3 * values / 16 + 1) + 8 bytes a layer and slot, 9 in place of 3 with whole codes.

    Args:
        slots: KV slots of the pool, the padding slot included.
        layers: global indices of the layers that are kept, ascending.
        values: quantized values of one group, a multiple of 16: the hidden size, or the intermediate size.
        groups: global scales a row: 1, or the number of experts a token is routed to.
        codes: keep whole codes instead of their lowest bits.
    """

    def __init__(
        self, slots: int, layers: tuple[int, ...], values: int, groups: int = 1, *, codes: bool = False
    ) -> None:
        blocks = groups * values // BLOCK
        self.layers = layers
        self.groups = groups
        self._row = {layer: i for i, layer in enumerate(layers)}
        self.keeps_codes = codes
        width, dtype = (blocks * BLOCK // 2, torch.uint8) if codes else (blocks, torch.int16)
        # uint16 has no index_put kernel on a CPU, so bits are held as int16.
        self._codes = torch.zeros(len(layers), slots, width, dtype=dtype)
        self._scales = torch.zeros(len(layers), slots, blocks, dtype=torch.uint8)
        self._global_log2 = torch.zeros(len(layers), slots, groups, dtype=torch.int8)
        self._pass = torch.full((len(layers), slots), NEVER_WRITTEN, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(held.nbytes for held in (self._codes, self._scales, self._global_log2, self._pass))

    def store(self, layer: int, slots: Tensor, quantized: Quantized, number: int) -> None:
        """Writes the rows of one forward pass.

        Args:
            layer: global layer index, one of `layers`.
            slots: int64 [N].
            quantized: N * G rows, those of a slot together and in the order of `slots`, with hints or codes, as they
                are kept, and a power-of-two global scale a row.
            number: of the forward pass.
        """
        i, n = self._row[layer], slots.shape[0]
        if self.keeps_codes:
            self._codes[i][slots] = quantized.codes.view(n, self._codes.shape[2])
        else:
            assert quantized.hints is not None
            self._codes[i][slots] = quantized.hints.view(torch.int16).view(n, self._codes.shape[2])
        self._scales[i][slots] = quantized.scales.view(n, self._scales.shape[2])
        self._global_log2[i][slots] = _exponent(quantized.global_scale).view(n, self.groups)
        self._pass[i][slots] = number

    def read(self, slots: Tensor, numbers: Tensor, layers: tuple[int, ...] | None = None) -> ExpertRows:
        """Copies rows.

        Args:
            slots: int64 [T].
            numbers: int64 [T], the pass that wrote each slot.
            layers: some of `layers`; None is all of them.
        """
        rows = torch.tensor([self._row[layer] for layer in (self.layers if layers is None else layers)])
        at = (rows.unsqueeze(0), slots.unsqueeze(1))
        kept = self._codes[at]
        return ExpertRows(
            bits=hint_bits(kept) if self.keeps_codes else kept.view(torch.uint16),
            scales=self._scales[at],
            global_log2=self._global_log2[at],
            present=(self._pass[at] == numbers.unsqueeze(1)).all(dim=1) & (numbers != NEVER_WRITTEN),
            codes=kept if self.keeps_codes else None,
        )


def _exponent(scale: Tensor) -> Tensor:
    """log2 of powers of two in fp32, as int8."""
    return ((scale.view(torch.int32) >> 23) - 127).to(torch.int8)
