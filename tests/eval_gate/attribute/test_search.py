"""The search on models whose losses are known: it finds the guilty part, layers and remedy within its budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eval_gate.attribute.conclusions import conclude
from eval_gate.attribute.cost import CostModel
from eval_gate.attribute.layers import Resolution
from eval_gate.attribute.readings import Standing
from eval_gate.attribute.search import Findings
from eval_gate.attribute.trials import Stage
from eval_gate.attribute.variants import Layout, Part
from eval_gate.policy import GatePolicy
from eval_gate.stats.rule import Outcome
from trace_serve.policy.dims import ModelDims
from trace_serve.recipe import Recipe

Known = Callable[..., Any]
In = Callable[[int], Callable[[Recipe], bool]]
LAYERS = tuple(range(16))
COST = CostModel(ModelDims("known", 16, 64, 128, 4, LAYERS, 2, 64, 10_000, 0), Layout(LAYERS, LAYERS, 64), 1000)
MANY = 60
"""Of 400 queries: a loss that blocks at a margin of 5 points."""


def said(found: Findings, recipe: Recipe) -> str:
    return "\n".join(conclude(found, recipe, GatePolicy(margin=0.05), COST))


def layer_sets(found: Findings, part: Part) -> list[tuple[tuple[int, ...], Resolution]]:
    return [(one.layers, one.resolution) for one in found.layers[part]]


def test_without_a_gap_nothing_is_searched(known: Known) -> None:
    model = known()
    found = model.search(Recipe(), 12)
    assert len(model.trials) == 1
    assert found.remedy is None
    assert found.suspects == ()
    assert "no gap to attribute" in said(found, Recipe())


def test_a_loss_of_one_kv_layer_is_found_and_mended_at_the_cost_of_that_layer(known: Known, in_kv_layer: In) -> None:
    model = known((in_kv_layer(5), MANY))
    found = model.search(Recipe(), 16)
    assert found.suspects == (Part.KV,)
    assert found.parts[Part.EXPERTS].standing is Standing.CLEAR
    assert layer_sets(found, Part.KV) == [((5,), Resolution.SINGLE)]
    remedy, reading = found.remedy
    assert reading.outcome is Outcome.PASS
    assert remedy.recipe == Recipe(kv_layers=tuple(i for i in range(16) if i != 5))
    one_layer = 2 * 2 * 64 * (16 - 4.5) / 8
    assert remedy.cost.kv_bytes_per_token - COST(Recipe()).kv_bytes_per_token == one_layer
    assert remedy.cost.weights_bytes == COST(Recipe()).weights_bytes
    assert [trial.stage for trial in model.trials[:3]] == [Stage.WHOLE, Stage.PARTS, Stage.PARTS]
    text = said(found, Recipe())
    assert "KV cache: layer 5 loses" in text
    assert f"costs +0 B of weights and +{one_layer:.0f} B of KV cache a token" in text
    assert "gate it on others before release" in text


def test_activations_are_told_from_weights_and_w4a16_is_offered(known: Known) -> None:
    model = known((lambda r: r.experts == "w4a4", MANY))
    found = model.search(Recipe(), 14)
    assert found.suspects == (Part.EXPERTS,)
    assert found.weights.standing is Standing.CLEAR
    assert found.remedy[0].recipe == Recipe(experts="w4a16")
    assert found.remedy[0].cost == COST(Recipe())
    assert "FP4 activations of the experts add to that: +15.0 points" in said(found, Recipe())


def test_the_first_remedy_that_passes_ends_the_search(known: Known) -> None:
    model = known((lambda r: r.experts != "bf16" and r.expert_rotation == 0, MANY))
    found = model.search(Recipe(), 16)
    assert found.remedy[0].recipe == Recipe(expert_rotation=16)
    assert model.trials[-1].recipe == Recipe(expert_rotation=16)
    assert found.stopped is None


@pytest.mark.parametrize("layers", [(11,), (3, 12), (6, 7)])
def test_guilty_expert_layers_are_found_by_bisection(
    known: Known, in_expert_layer: In, layers: tuple[int, ...]
) -> None:
    model = known(*((in_expert_layer(layer), MANY) for layer in layers))
    found = model.search(Recipe(), 40)
    assert layer_sets(found, Part.EXPERTS) == [((layer,), Resolution.SINGLE) for layer in layers]
    bisected = [trial for trial in model.trials if trial.stage is Stage.LAYERS]
    assert len(bisected) <= 2 * 4 * len(layers)
    # Taking the worst layer alone to BF16 mends one guilty layer; two need both.
    assert found.remedy[0].recipe == Recipe(expert_layers=tuple(i for i in LAYERS if i not in layers))


def test_a_loss_spread_over_all_layers_is_said_to_be_shared(known: Known) -> None:
    def every_layer(recipe: Recipe) -> bool:
        return recipe.experts != "bf16" and recipe.expert_layers is None

    model = known((every_layer, 30))
    found = model.search(Recipe(kv="bf16"), 24)
    assert layer_sets(found, Part.EXPERTS) == [(LAYERS, Resolution.SHARED)]
    assert "neither half loses beyond chance" in said(found, Recipe(kv="bf16"))
    assert found.parts == {}
    assert found.suspects == (Part.EXPERTS,)


def test_both_parts_are_mended_one_by_one_and_then_together(known: Known) -> None:
    model = known(
        (lambda r: r.experts == "w4a4", MANY),
        (lambda r: r.kv == "nvfp4" and r.k_rotation == 0, MANY),
    )
    found = model.search(Recipe(), 40)
    assert set(found.suspects) == {Part.EXPERTS, Part.KV}
    remedy, reading = found.remedy
    assert remedy.recipe == Recipe(experts="w4a16", k_rotation=64)
    assert reading.outcome is Outcome.PASS
    assert remedy.cost == COST(Recipe())


def test_parts_that_lose_only_together_are_not_blamed_alone(known: Known) -> None:
    def together(recipe: Recipe) -> bool:
        return recipe.experts == "w4a4" and recipe.kv == "nvfp4"

    model = known((together, MANY))
    found = model.search(Recipe(), 30)
    assert all(reading.standing is Standing.CLEAR for reading in found.parts.values())
    assert "each part alone is within the margin: the gap comes from both together" in said(found, Recipe())
    assert found.layers == {}
    assert found.remedy[0].recipe == Recipe(kv="bf16") or found.remedy[0].recipe == Recipe(experts="w4a16")
    assert found.remedy[1].outcome is Outcome.PASS


def test_a_budget_that_ends_leaves_what_was_found_and_says_so(known: Known, in_expert_layer: In) -> None:
    model = known(*((in_expert_layer(layer), 20) for layer in LAYERS), (lambda r: r.kv == "nvfp4", MANY))
    for engines in (1, 2, 3, 5, 9):
        model.trials.clear()
        found = model.search(Recipe(), engines)
        assert found.stopped == "engines"
        assert found.remedy is None
        assert len(model.trials) == engines
        assert "--budget left recipes untried" in said(found, Recipe())
    assert found.parts[Part.KV].standing is Standing.GUILTY


def test_no_remedy_of_a_part_that_blocks_by_itself_is_tried(known: Known) -> None:
    model = known((lambda r: r.experts != "bf16", MANY), (lambda r: r.kv == "nvfp4" and r.k_rotation == 0, 12))
    found = model.search(Recipe(), 40)
    tried = [trial.recipe for trial in model.trials if trial.stage is Stage.REMEDIES]
    assert not any(r.experts == "w4a16" and not r.expert_rotation and r.expert_layers is None for r in tried)
    assert "W4A16: with the other part in BF16, its experts already block" in found.left_out
    assert found.remedy[0].recipe.experts == "bf16"


def test_one_part_leaves_engines_for_the_other(known: Known) -> None:
    # Nothing but BF16 mends the experts; K rotation mends the KV cache.
    model = known((lambda r: r.experts != "bf16", MANY), (lambda r: r.kv == "nvfp4" and r.k_rotation == 0, 70))
    found = model.search(Recipe(), 18)
    assert found.remedy[0].recipe == Recipe(experts="bf16", k_rotation=64)


def test_when_time_is_up_the_search_ends(known: Known, in_kv_layer: In) -> None:
    model = known((in_kv_layer(5), MANY), stop_after=3)
    found = model.search(Recipe(), 16)
    assert found.stopped == "wall"
    assert len(model.trials) == 4
    assert "--max-wall left recipes untried" in said(found, Recipe())


def test_remedies_that_cannot_pass_or_be_served_are_named_and_not_tried(known: Known) -> None:
    model = known((lambda r: r.experts == "w4a4", MANY))
    found = model.search(Recipe(), 20, refuses=lambda r: "too wide" if r.expert_rotation == 64 else None)
    assert "experts rotated 64: too wide" in found.left_out
    assert not any(trial.recipe.expert_rotation == 64 for trial in model.trials)
    few = known((lambda r: r.experts == "w4a4", 8), count=40)
    found = few.search(Recipe(), 20, too_few="remedies: 40 queries are too few")
    assert found.left_out == ["remedies: 40 queries are too few"]
    assert not any(trial.stage is Stage.REMEDIES for trial in few.trials)


def test_what_chance_may_explain_is_not_bisected(known: Known) -> None:
    model = known((lambda r: r.experts == "w4a4", 2), count=60, noise=2)
    found = model.search(Recipe(kv="bf16"), 12)
    assert found.whole.standing is Standing.UNCLEAR
    assert found.layers == {}
