"""Which expert weights came from a packed checkpoint, so that they are not rounded a second time.

Rounding is not idempotent: a block whose scale is subnormal can become zero the second time. Weights are told by
content: an image handed to the model's loader is remembered by the fingerprints of the slices that the loader may cut
from it, one a tensor-parallel rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.policy.expert_names import parse
from trace_serve.policy.layouts import BF16

_known: set[int] = set()
_format = BF16
_generation = 0


def fingerprint(part: Tensor) -> int:
    """Identifies the content of a BF16 tensor in this process."""
    return hash(part.contiguous().view(torch.uint8).numpy().tobytes())


def begin(weights: str) -> None:
    """Starts a whole checkpoint of a format (`policy.layouts.FORMATS`): its images are the only ones."""
    global _generation
    forget(weights)
    _generation += 1


def generation() -> int:
    """Counts the checkpoints; what a layer held before the last one is not there any more, even if it looks alike."""
    return _generation


def forget(weights: str = BF16) -> None:
    """Nothing that is loaded from here on is an image."""
    global _format
    _known.clear()
    _format = weights


def checkpoint_format() -> str:
    """Format of the checkpoint loaded last; `bf16` where a trainer pushed weights since."""
    return _format


def remember(module: str, image: Tensor) -> None:
    """Notes one matrix of a packed checkpoint before SGLang loads it.

    Args:
        module: its module's name in the checkpoint.
        image: BF16 [N, K].
    """
    from sglang.srt.runtime_context import get_parallel

    matrix = parse(module)
    # The input of the second product is what tensor parallelism cuts, so that its columns are.
    columns = matrix is not None and matrix.projection == "down"
    for part in image.chunk(get_parallel().moe_tp_size, dim=1 if columns else 0):
        _known.add(fingerprint(part))


def holds(part: int) -> bool:
    """Whether a fingerprint is that of an image of the checkpoint loaded last."""
    return part in _known
