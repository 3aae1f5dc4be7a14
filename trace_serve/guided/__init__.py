"""Guided rounding, the trainer's side: rounding to NVFP4 as the rollout did, from its hints.

The rule lives here; what it is applied to (layers, optimizers, replay of hints) does not.
"""

from trace_serve.guided.rule import (
    TAU_ALIGNED,
    TAU_UNALIGNED,
    follow_codes,
    follow_parity,
    follow_scale_parity,
)

__all__ = ["TAU_ALIGNED", "TAU_UNALIGNED", "follow_codes", "follow_parity", "follow_scale_parity"]
