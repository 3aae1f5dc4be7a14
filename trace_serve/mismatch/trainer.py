"""The training-time version in transformers: log-probabilities and gradients of a rollout's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.errors import EngineError
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.hf.rounding import NearestRounding, Rounding
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.mismatch.bits import MeasuredRounding
from trace_serve.mismatch.metrics import Distance, distance
from trace_serve.mismatch.rollout import Rollout
from trace_serve.mismatch.variants import Variant
from trace_serve.recipe import Recipe


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
        import transformers

        transformers.utils.logging.disable_progress_bar()
        try:
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        except (OSError, ValueError, RuntimeError) as exc:
            raise EngineError(f"{directory}: cannot be loaded: {' '.join(str(exc).split())[:300]}") from exc
        self.layers = int(self._model.config.get_text_config().num_hidden_layers)
        self._rollout_recipe = rollout_recipe
        self._rounding: _Switch | None = None
        if recipe is not None:
            self._rounding = _Switch(NearestRounding(recipe))
            fake_quantize(self._model, recipe, self._rounding)
        self._routed = any(type(module).__name__.endswith("TopKRouter") for module in self._model.modules())

    def measure(self, variant: Variant, rollouts: Sequence[Rollout]) -> Distance:
        """Distances over every sampled token of the rollouts."""
        own: list[NDArray[np.float64]] = []
        theirs: list[NDArray[np.float64]] = []
        agreements: list[tuple[float, int]] = []
        measured: list[MeasuredRounding] = []
        for rollout in rollouts:
            rounding = self._prepare(variant, rollout)
            if rounding is not None:
                measured.append(rounding)
            with self._routes(variant, rollout) as routes, torch.inference_mode():
                scores = self._scores(rollout)
            sampled = rollout.sampled
            assert rollout.hints.logprobs is not None
            own.append(scores.double().numpy()[sampled])
            theirs.append(rollout.hints.logprobs.astype(np.float64)[sampled])
            if routes is not None:
                agreements.append((routes.agreement, rollout.hints.rows))
        rows = sum(count for _, count in agreements)
        return distance(
            np.concatenate(own),
            np.concatenate(theirs),
            router_agreement=sum(share * count for share, count in agreements) / rows if rows else None,
            bits_differ=MeasuredRounding.shares(measured),
        )

    def gradients(self, variant: Variant, rollout: Rollout) -> dict[int, Tensor]:
        """Gradient of the mean log-probability of the sampled tokens, fp32, flattened, by layer."""
        self._prepare(variant, rollout)
        self._model.zero_grad(set_to_none=True)
        with self._routes(variant, rollout), torch.enable_grad():
            scores = self._scores(rollout)
            torch.autograd.backward(scores[torch.from_numpy(rollout.sampled)].mean())
        found: dict[int, list[Tensor]] = {}
        for name, weight in self._model.named_parameters():
            layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
            if layer is not None and weight.grad is not None:
                found.setdefault(layer, []).append(weight.grad.float().flatten())
        self._model.zero_grad(set_to_none=True)
        return {layer: torch.cat(parts) for layer, parts in found.items()}

    def _scores(self, rollout: Rollout) -> Tensor:
        tokens = torch.from_numpy(rollout.tokens)
        logits = self._model(tokens[:-1].unsqueeze(0), use_cache=False).logits[0].float()
        return torch.log_softmax(logits, dim=-1).gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)

    def _prepare(self, variant: Variant, rollout: Rollout) -> MeasuredRounding | None:
        if self._rounding is None or variant.weights_only:
            return None
        layers = list(variant.layers(self.layers)) if variant.rounds == "guided" else []
        guided = HintedRounding(self._rollout_recipe, [rollout.hints], layers=layers)
        every = HintedRounding(self._rollout_recipe, [rollout.hints])
        measured = MeasuredRounding(guided, every, self._rollout_recipe)
        self._rounding.current = measured
        return measured

    def _routes(self, variant: Variant, rollout: Rollout) -> Any:
        if not self._routed or rollout.hints.routed_experts is None:
            return nullcontext(None)
        return RoutingReplay(self._model, [rollout.hints], follow=variant.routing)


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


def cosine(own: dict[int, Tensor], reference: dict[int, Tensor]) -> float:
    """Mean over layers of the cosine between two gradients."""
    pairs = [(own[layer], reference[layer]) for layer in sorted(reference) if layer in own]
    each = [torch.nn.functional.cosine_similarity(a, b, dim=0) for a, b in pairs]
    return float(torch.stack(each).mean())
