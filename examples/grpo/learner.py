"""The trainer: a transformers model that rounds and routes as its rollouts did, and AdamW on fp32 copies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from objective import mismatch, policy_loss
from rollouts import Sample
from torch import Tensor

from trace_serve.guided.plugs.hf import HintedModel, checkpoint_tensors
from trace_serve.guided.routing import RoutingReplay
from trace_serve.hints.rows import HintFile
from trace_serve.recipe import Recipe

ARMS = {
    "trace": "TRACE, hints in all layers",
    "qat": "vanilla QAT, rounded to nearest",
    "bf16": "BF16 trainer",
}


@dataclass(frozen=True)
class Update:
    """What one update measured, before the weights moved."""

    loss: float
    grad_norm: float
    mismatch: dict[str, float]


class Learner:
    """One policy in training. All arms replay the rollout's routes (R3); they differ in what is rounded, and how.

    The attention, router, norm and expert weights of the last `layers` layers are trained; the rest stays as it was.
    BF16 weights would swallow updates this small, so AdamW works on fp32 copies: 16 bytes a trained weight in all.

    Args:
        directory: the policy.
        recipe: that of the engine.
        arm: of `ARMS`.
        layers: trained layers, from the last.
        learning_rate: of AdamW, constant.
    """

    def __init__(self, directory: Path, recipe: Recipe, arm: str, *, layers: int, learning_rate: float) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).train()
        self._model.requires_grad_(False)
        every = self._model.get_decoder().layers
        self._trained = range(len(every))[-layers:]
        for layer in self._trained:
            every[layer].requires_grad_(True)
        self._arm = arm
        if arm != "bf16":
            HintedModel(self._model, recipe, layers=[] if arm == "qat" else None)
        self._weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._masters = [weight.detach().float() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained layers' weights under their checkpoint names; an engine with `partial_refit` has the rest."""
        prefixes = tuple(f"model.layers.{layer}." for layer in self._trained)
        return {name: each for name, each in checkpoint_tensors(self._model).items() if name.startswith(prefixes)}

    def update(self, samples: Sequence[Sample], advantage: Sequence[float]) -> Update:
        """One forward and backward pass over all samples, and one step of the optimizer.

        Weights are rounded once a pass, which is most of its time on a CPU, so a batch is one pass.
        """
        logp, theirs = self._logp(samples), torch.cat([_rollout_logp(sample) for sample in samples])
        counts = torch.tensor([len(sample.places) for sample in samples])
        loss = policy_loss(logp, theirs, torch.tensor(advantage).float().repeat_interleave(counts))
        loss.backward()  # type: ignore[no-untyped-call]
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)
        return Update(float(loss.detach()), float(norm), mismatch(logp, theirs))

    def _logp(self, samples: Sequence[Sample]) -> Tensor:
        """Log-probabilities [N] of every sampled token, sample by sample."""
        files = [sample.hints for sample in samples]
        ids = torch.zeros(len(files), max(each.rows for each in files), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(files):
            ids[row, : each.rows] = torch.from_numpy(each.token_ids.astype("int64"))
            mask[row, : each.rows] = 1
        follow, named = self._following(files)
        with follow:
            logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False, **named).logits
        found = []
        for row, sample in enumerate(samples):
            places = torch.from_numpy(sample.places)
            tokens = torch.from_numpy(sample.next_tokens)[places]
            scores = torch.log_softmax(logits[row, places].float(), dim=-1)
            found.append(scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
        return torch.cat(found)

    def _following(self, files: list[HintFile]) -> tuple[AbstractContextManager[Any], dict[str, Any]]:
        if self._arm == "bf16":
            return RoutingReplay(self._model, files), {}
        return nullcontext(), {"rollout_hints": files}


def _rollout_logp(sample: Sample) -> Tensor:
    assert sample.hints.logprobs is not None
    return torch.from_numpy(sample.hints.logprobs[sample.places])
