"""Rollouts of QUADS, computed in transformers: a second FP4 pass over what the first one lost.

The engine has no such pass. Each operand x of an expert's products becomes Q(x) + Q(x - Q(x)), the second term in the
worse half of the channels only: those with the largest mean squared residual over the prompts, fixed for each layer
and site. Weights and KV cache are those of the recipe. Tokens are sampled one at a time from a KV cache, as engines do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.hf.rounding import NearestRounding
from trace_serve.hints.rows import HintFile
from trace_serve.mismatch.metrics import Top
from trace_serve.mismatch.rollout import Rollout, Sampling
from trace_serve.mismatch.trainer import load_model
from trace_serve.nvfp4 import fake_quantize_tokens
from trace_serve.recipe import BLOCK, Recipe

SEED = 0


class QuadsRounding(NearestRounding):
    """Nearest rounding that watches its residuals until `choose`, then rounds those of the worse channels too."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._given = recipe
        self._squares: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._worse: dict[tuple[str, int], Tensor] = {}

    def choose(self) -> None:
        """Fixes the channels, a multiple of 16 of them, so that they are blocks of their own."""
        for place, squares in self._squares.items():
            energy = torch.stack(squares).sum(dim=0)
            count = energy.shape[0] // 2 // BLOCK * BLOCK
            self._worse[place] = energy.topk(count).indices.sort().values
        self._squares.clear()

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        scale = self._given.experts_in_scale(layer)
        return self._twice(("experts_in", layer), x, super().experts_in(layer, x), scale)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        scale = self._given.experts_mid_scale(layer)
        return self._twice(("experts_mid", layer), x, super().experts_mid(layer, x, rows, places), scale)

    def _twice(self, place: tuple[str, int], x: Tensor, kept: Tensor, scale: float | None) -> Tensor:
        residual = x.float() - kept.float()
        worse = self._worse.get(place)
        if worse is None:
            self._squares[place].append(residual.square().sum(dim=0))
            return kept
        second = fake_quantize_tokens(residual[:, worse], self._given, static_scale=scale)
        return kept.float().index_add(1, worse, second)


def roll_out_quads(
    directory: Path,
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Rollout]:
    """Samples one continuation a prompt. The hint files have log-probabilities and routes, but no site.

    Args:
        directory: Hugging Face model, BF16.
        recipe: whose experts are W4A4.

    Raises:
        EngineError: the model cannot be loaded.
        ConfigError: it has parts that cannot be quantized in transformers.
    """
    model = load_model(directory)
    rounding = QuadsRounding(recipe)
    fake_quantize(model, recipe, rounding)
    with torch.inference_mode():
        for prompt in prompts:
            model(torch.tensor([list(prompt)]), use_cache=False)
        rounding.choose()
        found = []
        for index, prompt in enumerate(prompts):
            progress(f"sampling QUADS rollout {index + 1} of {len(prompts)} in transformers")
            found.append(_sample(model, recipe, list(prompt), sampling, SEED + index))
    return found


def _sample(model: Any, recipe: Recipe, prompt: list[int], sampling: Sampling, seed: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    temperature = sampling.temperature or 1.0
    cache, inputs, tokens = None, prompt, list(prompt)
    logprobs, tops = [], []
    with _routes(model) as routes:
        for _ in range(sampling.tokens):
            output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            each = torch.log_softmax(output.logits[0, -1].float() / temperature, dim=-1)
            drawn = torch.multinomial(each.exp(), 1, generator=generator) if sampling.temperature else each.argmax()
            inputs = [int(drawn)]
            tokens += inputs
            logprobs.append(float(each[inputs[0]]))
            tops.append(each.topk(sampling.top))
    rows = len(tokens) - 1
    padded = np.full(rows, np.nan, dtype=np.float32)
    padded[-sampling.tokens :] = logprobs
    hints = HintFile(
        token_ids=np.array(tokens[:-1], dtype=np.int32),
        sites=(),
        recipe_id=recipe.recipe_id,
        model_digest="",
        weight_versions=((0, rows, ""),),
        logprobs=padded,
        routed_experts=torch.stack([torch.cat(layer) for layer in routes], dim=1).numpy() if routes else None,
        next_token_id=tokens[-1],
    )
    ids, values = torch.stack([top.indices for top in tops]), torch.stack([top.values for top in tops])
    return Rollout(hints, Top(ids.numpy(), values.double().numpy()), temperature)


@contextmanager
def _routes(model: Any) -> Iterator[list[list[Tensor]]]:
    """Experts that tokens are sent to, [T, k] a pass, for each router."""
    found: list[list[Tensor]] = []
    handles = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            layer: list[Tensor] = []
            found.append(layer)
            handles.append(module.register_forward_hook(lambda _, __, output, layer=layer: layer.append(output[2])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
