"""Routing replay (R3): every token goes to the experts that its rollout sent it to.

The weights of the chosen experts stay the trainer's own, computed from its own router's logits, so that the router
learns. Tokens without a recorded route are routed by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.hints.rows import HintFile

ROUTERS = ("Mixtral", "Qwen3Moe", "Olmoe", "Qwen3_5Moe", "Qwen2Moe", "Qwen3Next")
"""Families whose router weighs experts by a softmax over all, renormalized over the chosen ones where it says so."""


class RoutingReplay(AbstractContextManager["RoutingReplay"]):
    """Makes a transformers model follow recorded routes until the context ends.

    Args:
        model: its routers, of `ROUTERS`, return (logits [T, E], weights [T, k], experts [T, k]).
        hints: a file a sequence of the batch, in its order; None leaves that sequence alone.
        follow: False compares the routes and lets the trainer's stand.

    Raises:
        ConfigError: the model has no such router.
        HintFormatError: a file's routes are of another number of layers or experts.
    """

    def __init__(self, model: Any, hints: Sequence[HintFile | None], *, follow: bool = True) -> None:
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if not routers:
            raise ConfigError(f"{type(model).__name__}: has no router whose choice can be replayed", field="model")
        unknown = {type(each).__name__ for each in routers} - {f"{family}TopKRouter" for family in ROUTERS}
        if unknown:
            raise ConfigError(
                f"{type(model).__name__}: how {', '.join(sorted(unknown))} weighs experts is not known, expected a "
                f"router of {', '.join(ROUTERS)}; go without routes (replay_routes=False)",
                field="model",
            )
        self._routes = [_routes(each, len(routers), routers[0].top_k, routers[0].num_experts) for each in hints]
        self._firsts = [0 if each is None else each.first_token for each in hints]
        self._follow = follow
        self._first = self._count = 0
        self._replayed, self._seen = [0] * len(routers), [0] * len(routers)
        decoder = model.get_decoder()
        self._handles = [decoder.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for layer, router in enumerate(routers):
            self._handles.append(router.register_forward_hook(self._hook(layer)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def agreement(self) -> float:
        """Share of the recorded choices that the trainer's router makes too; NaN before any."""
        return sum(self._seen) / sum(self._replayed) if any(self._replayed) else float("nan")

    @property
    def agreements(self) -> tuple[float, ...]:
        """The same for each router."""
        pairs = zip(self._seen, self._replayed, strict=True)
        return tuple(seen / replayed if replayed else float("nan") for seen, replayed in pairs)

    def _begin(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = next(x for x in (*arguments, named.get("input_ids"), named.get("inputs_embeds")) if x is not None)
        cache = named.get("past_key_values")
        self._first = 0 if cache is None else cache.get_seq_length()
        self._count = tokens.shape[1]

    def _hook(self, layer: int) -> Any:
        def replay(module: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, experts = output
            chosen, known = self._chosen(layer, experts)
            if not bool(known.any()):
                return output
            own = experts[known]
            self._replayed[layer] += own.numel()
            self._seen[layer] += int((own.unsqueeze(-1) == chosen[known].unsqueeze(-2)).any(dim=-1).sum())
            if not self._follow:
                return output
            chosen = torch.where(known.unsqueeze(-1), chosen, experts)
            probabilities = torch.softmax(logits.float(), dim=-1).gather(-1, chosen)
            if getattr(module, "norm_topk_prob", True):
                probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
            return logits, probabilities.to(weights.dtype), chosen

        return replay

    def _chosen(self, layer: int, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Recorded experts [T, k] of the pass's rows, and bool [T] where there are any."""
        chosen, known = experts.clone(), torch.zeros(experts.shape[0], dtype=torch.bool, device=experts.device)
        for sequence, routes in enumerate(self._routes):
            if routes is None:
                continue
            table, present = routes
            start = self._first - self._firsts[sequence]
            low, high = max(0, -start), min(self._count, table.shape[0] - start)
            if high <= low:
                continue
            rows = slice(sequence * self._count + low, sequence * self._count + high)
            chosen[rows] = table[start + low : start + high, layer].to(experts.device, experts.dtype)
            known[rows] = present[start + low : start + high].to(experts.device)
        return chosen, known


def _routes(hints: HintFile | None, layers: int, top_k: int, experts: int) -> tuple[Tensor, Tensor] | None:
    if hints is None or hints.routed_experts is None:
        return None
    routed = hints.routed_experts
    if routed.shape[1:] != (layers, top_k) or (routed.size and not 0 <= routed.min() <= routed.max() < experts):
        found = f"{list(routed.shape[1:])} of up to {int(routed.max(initial=0))}"
        raise HintFormatError(
            f"routed_experts: got {found}, expected {layers} MoE layers and {top_k} of {experts} experts; use hints of "
            "this model",
            field="routed_experts",
        )
    present = np.ones(hints.rows, dtype=np.bool_) if hints.routed_present is None else hints.routed_present
    return torch.from_numpy(routed.astype(np.int64)), torch.from_numpy(present.copy())
