"""How attention sees one side of a packed KV pool."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.engine import state


class GatheredKV:
    """Stands for a dequantized buffer [slots, heads, D]: indexing it dequantizes the slots asked for, to BF16."""

    def __init__(self, codes: Tensor, scales: Tensor, global_scale: float) -> None:
        self.codes, self.scales, self.global_scale = codes, scales, global_scale
        self.shape = torch.Size((codes.shape[0], codes.shape[1], codes.shape[2] * 2))
        self.dtype = torch.bfloat16

    def __getitem__(self, index: Tensor) -> Tensor:
        return state.get().kernels.gather_dequantize(self.codes, self.scales, index, self.global_scale)
