"""Rollouts for the tests of plugs: hint files of tiny models with arbitrary bits and routes, without an engine.

Arbitrary outcomes differ from nearest rounding everywhere, so a row that goes to the wrong token cannot pass.
"""

from __future__ import annotations

import engine_model
import numpy as np
import torch

from trace_serve.hints.rows import HintFile, Site
from trace_serve.recipe import BLOCK, Recipe

RECIPE = Recipe()
LAYERS = tuple(range(engine_model.LAYERS))


def rollout(
    seed: int,
    tokens: int,
    *,
    first: int = 0,
    routes: bool = True,
    recipe: Recipe = RECIPE,
    kv_layers: tuple[int, ...] = LAYERS,
    head_dim: int = engine_model.HEAD_DIM,
) -> HintFile:
    """Hints of `tokens` tokens, whose last one has no row; with `first`, the rows before it are absent too."""
    kept = engine_model.KV_HEADS * head_dim // BLOCK
    shapes = {"experts_in": (LAYERS, engine_model.HIDDEN // BLOCK), "k": (kv_layers, kept), "v": (kv_layers, kept)}
    rng = np.random.default_rng(seed)
    ids = np.array(engine_model.token_ids(seed, tokens), dtype=np.int32)[first:-1]
    sites = tuple(
        Site(
            name=name,
            layers=layers,
            bits=rng.integers(0, 1 << 16, (len(ids), len(layers), blocks), dtype=np.uint16),
            scales=rng.integers(0, 2, (len(ids), len(layers), blocks), dtype=np.uint8),
            present=rng.random(len(ids)) < 0.9,
            scale_kind="lsb",
        )
        for name, (layers, blocks) in shapes.items()
    )
    routed = rng.random((len(ids), len(LAYERS), engine_model.EXPERTS)).argsort(axis=-1)[..., :2].astype(np.uint8)
    return HintFile(
        token_ids=ids,
        sites=sites,
        recipe_id=recipe.recipe_id,
        model_digest="",
        weight_versions=((0, len(ids), "step-1"),),
        first_token=first,
        routed_experts=routed if routes else None,
    )


def tokens_of(seed: int, tokens: int) -> torch.Tensor:
    """int64 [1, tokens], those of `rollout`."""
    return torch.tensor([engine_model.token_ids(seed, tokens)])
