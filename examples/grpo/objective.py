"""What GRPO computes from rewards and log-probabilities; no model in here."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.mismatch.metrics import CLIP

Floats = NDArray[np.float64]


def advantages(rewards: Floats) -> Floats | None:
    """(r - mean) / standard deviation of one group's rewards [G] (Shao et al., 2024).

    None where all rewards are equal, or there are none: such a group does not say which answer was better.
    """
    spread = rewards.std() if rewards.size else 0.0
    return None if spread < 1e-6 else (rewards - rewards.mean()) / spread


def policy_loss(logp: Tensor, rollout_logp: Tensor, advantage: Tensor, *, clip: float = CLIP) -> Tensor:
    """Mean over N sampled tokens of -w * advantage * logp, where w = min(p_trainer / p_rollout, clip) has no gradient.

    The rollout is the policy that sampled, whatever its numerics and its weights, so w corrects for both; it is
    truncated token by token. There is one update a batch, hence no second ratio to an older trainer, and no KL term.

    Args:
        logp: [N], of the trainer, with gradient.
        rollout_logp: [N], as the engine sampled.
        advantage: [N], that of each token's answer.
    """
    weight = (logp.detach() - rollout_logp).exp().clamp(max=clip)
    return -(weight * advantage * logp).mean()


def is_fresh(sampled_by: int, updates: int, max_version_diff: int) -> bool:
    """Whether weights after `updates` updates may learn from a token that those after `sampled_by` sampled."""
    return updates - sampled_by <= max_version_diff


def mismatch(logp: Tensor, rollout_logp: Tensor) -> dict[str, float]:
    """Distance of the trainer to the rollout over N tokens, as `trace-serve mismatch` defines it."""
    delta = (logp.detach() - rollout_logp).double()
    ratio = delta.exp()
    return {
        "abs_delta": float(delta.abs().mean()),
        "k3": float((torch.expm1(delta) - delta).mean()),
        "ratio_max": float(ratio.max()),
        "clipped": float(((ratio > CLIP) | (ratio < 1 / CLIP)).double().mean()),
    }
