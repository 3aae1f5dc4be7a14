"""The training-time version in transformers: log-probabilities and gradients of a rollout's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_serve.errors import EngineError
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.hf.rounding import NearestRounding, Rounding
from trace_serve.guided.quantize import Mode
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.mismatch.metrics import Distance, Scores, distance, divergence, same_top
from trace_serve.mismatch.rollout import Rollout
from trace_serve.mismatch.sites import MeasuredRounding, SiteShares, shares
from trace_serve.mismatch.variants import Variant
from trace_serve.recipe import Recipe


@dataclass(frozen=True)
class Measured:
    """One variant against some rollouts.

    Attributes:
        distance: over every sampled token.
        router: share of the rollouts' expert choices that the trainer's router makes too, by MoE layer; empty where
            there are no routes to compare with.
        sites: what differs before it is guided, by site; empty where nothing is quantized.
    """

    distance: Distance
    router: tuple[float, ...]
    sites: dict[str, SiteShares]


class Trainer:
    """One model under one recipe, measured against rollouts under any rounding.

    Args:
        directory: Hugging Face model, BF16.
        recipe: what its experts and KV are fake-quantized under; None is BF16.
        rollout_recipe: that of the rollouts, whose hints are followed.

    Raises:
        EngineError: the model cannot be loaded.
        ConfigError: it has parts that cannot be quantized in transformers.
    """

    def __init__(self, directory: Path, recipe: Recipe | None, rollout_recipe: Recipe) -> None:
        self._model = load_model(directory)
        self.layers = int(self._model.config.get_text_config().num_hidden_layers)
        self._rollout_recipe = rollout_recipe
        self._rounding: _Switch | None = None
        if recipe is not None:
            self._rounding = _Switch(NearestRounding(recipe))
            fake_quantize(self._model, recipe, self._rounding)
        self._routed = any(type(module).__name__.endswith("TopKRouter") for module in self._model.modules())

    def measure(self, variant: Variant, rollouts: Sequence[Rollout], *, sites: bool = True) -> Measured:
        """Distances over every sampled token of the rollouts; `sites` counts what differs at each site too."""
        scores: list[Scores] = []
        routers: list[Tensor] = []
        measured: list[MeasuredRounding] = []
        for rollout in rollouts:
            rounding = self._prepare(variant, rollout, compare=sites)
            if isinstance(rounding, MeasuredRounding):
                measured.append(rounding)
            with self._routes(variant, rollout) as routes, torch.inference_mode():
                logprobs = self._logprobs(rollout)
                ids = torch.from_numpy(rollout.top.ids)
                top = logprobs.gather(-1, ids).double().numpy()
                own = logprobs.gather(-1, _next(rollout)).squeeze(-1).double().numpy()
                largest = logprobs.amax(dim=-1).double().numpy()
            delta = own - rollout.logprobs
            kl = divergence(rollout.top, top, rollout.next_tokens, delta)
            scores.append(Scores(delta, kl, same_top(rollout.top, top, largest)))
            if routes is not None:
                routers.append(torch.tensor(routes.agreements, dtype=torch.float64) * rollout.hints.rows)
        rows = sum(rollout.hints.rows for rollout in rollouts)
        router = tuple((torch.stack(routers).sum(dim=0) / rows).tolist()) if routers else ()
        return Measured(distance(scores), router, shares(measured))

    def gradients(self, variant: Variant, rollout: Rollout) -> dict[int, Tensor]:
        """Gradient of the mean log-probability of the sampled tokens, BF16, flattened, by layer."""
        self._prepare(variant, rollout, compare=False)
        self._model.zero_grad(set_to_none=True)
        with self._routes(variant, rollout), torch.enable_grad():
            torch.autograd.backward(self._logprobs(rollout).gather(-1, _next(rollout)).mean())
        found: dict[int, list[Tensor]] = {}
        for name, weight in self._model.named_parameters():
            layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
            if layer is not None and weight.grad is not None:
                found.setdefault(layer, []).append(weight.grad.flatten())
        self._model.zero_grad(set_to_none=True)
        return {layer: torch.cat(parts) for layer, parts in found.items()}

    def _logprobs(self, rollout: Rollout) -> Tensor:
        """fp32 [S, V] at the sampled positions."""
        tokens = torch.from_numpy(rollout.tokens)
        hidden = self._model(tokens[:-1].unsqueeze(0), use_cache=False).logits[0]
        logits = hidden[torch.from_numpy(rollout.sampled)].float()
        return torch.log_softmax(logits / rollout.temperature, dim=-1)

    def _prepare(self, variant: Variant, rollout: Rollout, *, compare: bool) -> Rounding | None:
        if self._rounding is None or variant.weights_only:
            return None
        recipe = self._rollout_recipe
        layers = [] if variant.rounds == "nearest" else list(variant.layers(self.layers))
        mode: Mode = "replay" if variant.rounds == "replay" else "guided"
        hints, sites = [variant.seen(rollout.hints)], variant.sites
        chosen: Rounding
        chosen = guided = HintedRounding(recipe, hints, layers=layers, sites=sites, mode=mode)
        if compare:
            chosen = MeasuredRounding(guided, HintedRounding(recipe, [rollout.hints], mode="replay"), recipe)
        self._rounding.current = chosen
        return chosen

    def _routes(self, variant: Variant, rollout: Rollout) -> Any:
        if not self._routed or rollout.hints.routed_experts is None:
            return nullcontext(None)
        return RoutingReplay(self._model, [rollout.hints], follow=variant.routing)


def load_model(directory: Path) -> Any:
    """A transformers model in BF16, in evaluation mode.

    Raises:
        EngineError: it cannot be loaded.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    except (OSError, ValueError, RuntimeError) as exc:
        raise EngineError(f"{directory}: cannot be loaded: {' '.join(str(exc).split())[:300]}") from exc


def _next(rollout: Rollout) -> Tensor:
    """int64 [S, 1], the sampled tokens."""
    return torch.from_numpy(rollout.next_tokens).unsqueeze(-1)


class _Switch:
    """A rounding that can be exchanged after the model was prepared with it."""

    def __init__(self, current: Rounding) -> None:
        self.current = current

    def begin(self, first: int, count: int) -> None:
        self.current.begin(first, count)

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        return self.current.experts_in(layer, x)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        return self.current.experts_mid(layer, x, rows, places)

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        return self.current.keys(layer, x, first)

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        return self.current.values(layer, x, first)


def cosines(own: dict[int, Tensor], reference: dict[int, Tensor]) -> Tensor:
    """Cosine between two gradients, float64 [layers], layer by layer."""
    pairs = ((own[layer].double(), reference[layer].double()) for layer in sorted(reference))
    return torch.stack([a.dot(b) / (a.norm() * b.norm()) for a, b in pairs])
