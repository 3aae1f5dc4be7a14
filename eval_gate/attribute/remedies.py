"""What might mend a part that loses, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval_gate.attribute.cost import Cost
from eval_gate.attribute.variants import Layout, Part, in_bf16, layer_text, limited_to, quantized_layers, weights_only
from trace_serve.errors import ConfigError
from trace_serve.recipe import ROTATIONS, Recipe

_EXPERT_ROTATIONS = (16, 64)


@dataclass(frozen=True)
class Candidate:
    """A changed recipe and its bytes."""

    label: str
    recipe: Recipe
    cost: Cost


def ladder(
    recipe: Recipe,
    part: Part,
    layout: Layout,
    losing: Sequence[tuple[int, ...]],
    cost: Callable[[Recipe], Cost],
    refuses: Callable[[Recipe], str | None],
) -> tuple[list[Candidate], list[str]]:
    """Remedies of one part in order of rising cost, and those that the model or the recipe cannot have, with reasons.

    Among remedies of equal bytes those that compute the least come first. The last is the part in BF16.

    Args:
        losing: sets of layers that lose, the worst first; they go to BF16 one after the other.
        refuses: why an engine would not serve the model under a recipe; None if it would.
    """
    build = _expert_steps if part is Part.EXPERTS else _kv_steps
    found, left_out = [], []
    seen = {recipe.recipe_id}
    for label, base, changes in build(recipe, layout, losing):
        try:
            changed = replace(base, **changes)
        except ConfigError as exc:
            left_out.append(f"{label}: {exc}")
            continue
        if changed.recipe_id in seen:
            continue
        seen.add(changed.recipe_id)
        reason = refuses(changed)
        if reason is not None:
            left_out.append(f"{label}: {reason}")
            continue
        found.append(Candidate(label, changed, cost(changed)))
    return sorted(found, key=lambda one: one.cost.total_bytes), left_out


Step = tuple[str, Recipe, dict[str, Any]]
"""Label, recipe to start from, and the choices that change in it."""


def _expert_steps(recipe: Recipe, layout: Layout, losing: Sequence[tuple[int, ...]]) -> list[Step]:
    steps: list[Step] = [
        (f"experts rotated {width}", recipe, {"expert_rotation": width}) for width in _EXPERT_ROTATIONS
    ]
    values = "experts" if recipe.experts == "w4a4" else "weights"
    steps.append(("4over6", recipe, {"four_over_six": values, "weight_tiles": "1x16"}))
    plain = weights_only(recipe)
    if recipe.experts == "w4a4":
        steps.append(("W4A16", plain, {}))
        # A wide rotation serves weights better, a narrow one activations.
        steps += [
            (f"W4A16 rotated {width}", plain, {"expert_rotation": width}) for width in reversed(_EXPERT_ROTATIONS)
        ]
    kept = quantized_layers(recipe, Part.EXPERTS, layout)
    for gone in _growing(losing):
        rest = [layer for layer in kept if layer not in gone]
        where = f"BF16 experts in layers {layer_text(gone)}"
        steps.append((where, limited_to(recipe, Part.EXPERTS, rest, layout), {}))
        if recipe.experts == "w4a4" and rest:
            steps.append((f"W4A16, {where}", limited_to(plain, Part.EXPERTS, rest, layout), {}))
    steps.append(("BF16 experts", in_bf16(recipe, Part.EXPERTS), {}))
    return steps


def _kv_steps(recipe: Recipe, layout: Layout, losing: Sequence[tuple[int, ...]]) -> list[Step]:
    fitting = [width for width in ROTATIONS if width and layout.head_dim % width == 0]
    widths = sorted({*fitting[-1:], *fitting[:1]}, reverse=True)
    steps: list[Step] = [(f"K rotated {width}", recipe, {"k_rotation": width}) for width in widths]
    kept = quantized_layers(recipe, Part.KV, layout)
    for gone in _growing(losing):
        rest = [layer for layer in kept if layer not in gone]
        where = f"BF16 KV in layers {layer_text(gone)}"
        limited = limited_to(recipe, Part.KV, rest, layout)
        steps.append((where, limited, {}))
        if rest and widths:
            steps.append((f"K rotated {widths[0]}, {where}", limited, {"k_rotation": widths[0]}))
    steps.append(("BF16 KV", in_bf16(recipe, Part.KV), {}))
    return steps


def _growing(losing: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first set, the first two together, and so on."""
    return [tuple(sorted(sum(losing[: count + 1], ()))) for count in range(len(losing))]
