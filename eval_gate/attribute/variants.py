"""Recipes with less in FP4: what tells parts, activations and layers apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from trace_serve.recipe import E4M3_MAX, Recipe


class Part(StrEnum):
    """What a recipe quantizes."""

    EXPERTS = "experts"
    KV = "kv"

    @property
    def words(self) -> str:
        return "experts" if self is Part.EXPERTS else "KV cache"

    @property
    def other(self) -> Part:
        return Part.KV if self is Part.EXPERTS else Part.EXPERTS


@dataclass(frozen=True)
class Layout:
    """What of a model can be in FP4.

    Attributes:
        expert_layers: layers with routed experts, in ascending order.
        kv_layers: layers with a KV cache, likewise.
        head_dim: width of one head of K.
    """

    expert_layers: tuple[int, ...]
    kv_layers: tuple[int, ...]
    head_dim: int

    def of(self, part: Part) -> tuple[int, ...]:
        return self.expert_layers if part is Part.EXPERTS else self.kv_layers


def quantized_layers(recipe: Recipe, part: Part, layout: Layout) -> tuple[int, ...]:
    """The layers whose experts, or whose KV cache, the recipe keeps in FP4."""
    chosen = recipe.quantizes_experts if part is Part.EXPERTS else recipe.quantizes_kv
    return tuple(layer for layer in layout.of(part) if chosen(layer))


def in_bf16(recipe: Recipe, part: Part) -> Recipe:
    """The recipe with one part in BF16, in every layer."""
    if part is Part.KV:
        return replace(recipe, kv="bf16", kv_layers=None, k_rotation=0, k_global_scale=None, v_global_scale=None)
    return replace(
        recipe,
        experts="bf16",
        expert_layers=None,
        expert_rotation=0,
        experts_in_global_scale=None,
        experts_mid_global_scale=None,
        four_over_six="off",
        global_scale_max=E4M3_MAX,
        weight_tiles="1x16",
    )


def only(recipe: Recipe, part: Part) -> Recipe:
    """The recipe with just one part in FP4."""
    return in_bf16(recipe, part.other)


def limited_to(recipe: Recipe, part: Part, layers: Iterable[int], layout: Layout) -> Recipe:
    """The recipe with one part in FP4 in these layers alone; without any layer the part is in BF16."""
    chosen = tuple(sorted(layers))
    if chosen == quantized_layers(recipe, part, layout):
        return recipe
    if not chosen:
        return in_bf16(recipe, part)
    return replace(recipe, expert_layers=chosen) if part is Part.EXPERTS else replace(recipe, kv_layers=chosen)


def weights_only(recipe: Recipe) -> Recipe:
    """The recipe with the experts' inputs in BF16: W4A16 in place of W4A4."""
    return replace(
        recipe,
        experts="w4a16",
        experts_in_global_scale=None,
        experts_mid_global_scale=None,
        four_over_six="off" if recipe.four_over_six == "off" else "weights",
    )


def describe(recipe: Recipe, layout: Layout) -> str:
    """What is in FP4 and how, in a few words."""
    parts = []
    for part in Part:
        layers = quantized_layers(recipe, part, layout)
        if not layers:
            continue
        words = [recipe.experts.upper() + " experts" if part is Part.EXPERTS else "NVFP4 KV"]
        if part is Part.EXPERTS and recipe.expert_rotation:
            words.append(f"rotated {recipe.expert_rotation}")
        if part is Part.EXPERTS and recipe.four_over_six != "off":
            words.append("4over6")
        if part is Part.KV and recipe.k_rotation:
            words.append(f"K rotated {recipe.k_rotation}")
        if layers != layout.of(part):
            words.append(f"layers {layer_text(layers)}")
        parts.append(" ".join(words))
    return ", ".join(parts) or "BF16"


def layer_text(layers: Iterable[int]) -> str:
    """Layer indices with runs as ranges: `0-3, 7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
