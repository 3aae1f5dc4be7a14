"""The findings of a search in sentences."""

from __future__ import annotations

from collections.abc import Callable

from eval_gate.attribute.cost import Cost
from eval_gate.attribute.layers import LayerSet, Resolution
from eval_gate.attribute.readings import Reading, Standing, contrast
from eval_gate.attribute.search import Findings
from eval_gate.attribute.variants import Part, in_bf16, layer_text
from eval_gate.policy import GatePolicy
from eval_gate.report import format as fmt
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import Comparison
from trace_serve.recipe import Recipe

CHOSEN_HERE = (
    "the remedy was chosen on these queries, so its gap looks better than it is: gate it on others before release"
)


def conclude(found: Findings, recipe: Recipe, policy: GatePolicy, cost: Callable[[Recipe], Cost]) -> tuple[str, ...]:
    """What was found, the most important first."""
    if found.whole is None:
        return ("nothing was tried: the budget ended with the BF16 answers",)
    whole = f"the recipe as it is: {gap_text(found.whole.comparison)}"
    if found.whole.outcome is Outcome.PASS:
        return (f"{whole}, within the margin; there is no gap to attribute",)
    said = [whole]
    said += _parts(found, policy)
    said += _activations(found, policy)
    for part, sets in found.layers.items():
        said.append(f"{part.words}: " + "; ".join(map(_layer_set, sets)))
    said += _remedy(found, recipe, cost)
    if found.stopped is not None:
        flag = "--budget" if found.stopped == "engines" else "--max-wall"
        said.append(
            f"{flag} left recipes untried; raise it and run again, answers that are recorded are not asked again"
        )
    return tuple(said)


def gap_text(found: Comparison) -> str:
    return f"gap {fmt.points(found.gap)} points {fmt.interval(found.lower, found.upper)}"


def _parts(found: Findings, policy: GatePolicy) -> list[str]:
    tried = {part: reading for part, reading in found.parts.items() if reading is not None}
    said = []
    for part, reading in tried.items():
        said.append(f"{part.words} alone in FP4: {gap_text(reading.comparison)}, {_standing(reading)}")
    if len(tried) == len(Part):
        if all(reading.standing is Standing.CLEAR for reading in tried.values()):
            said.append("each part alone is within the margin: the gap comes from both together")
        worst, other = sorted(Part, key=lambda part: -tried[part].gap)
        between = contrast(tried[worst], tried[other], policy)
        said.append(_contrast(f"the loss of the {worst.words} exceeds that of the {other.words}", between))
    return said


def _activations(found: Findings, policy: GatePolicy) -> list[str]:
    if found.weights is None:
        return []
    both = found.parts.get(Part.EXPERTS) or found.whole
    assert both is not None
    said = [f"expert weights alone in FP4 (W4A16): {gap_text(found.weights.comparison)}, {_standing(found.weights)}"]
    said.append(_contrast("FP4 activations of the experts add to that", contrast(both, found.weights, policy)))
    return said


def _contrast(claim: str, between: Comparison) -> str:
    shown = between.lower is not None and between.lower > 0
    amount = f"{fmt.points(between.gap)} points {fmt.interval(between.lower, between.upper)}"
    return f"{claim}: {amount}" if shown else f"not shown that {claim}: {amount}"


def _standing(reading: Reading) -> str:
    if reading.standing is Standing.UNCLEAR:
        return "neither a loss nor its absence is shown"
    return "within the margin" if reading.standing is Standing.CLEAR else "a loss beyond chance"


def _layer_set(one: LayerSet) -> str:
    layers = f"layer{'s' if len(one.layers) > 1 else ''} {layer_text(one.layers)}"
    note = {
        Resolution.SINGLE: "",
        Resolution.SHARED: ", together: neither half loses beyond chance and the margin by itself",
        Resolution.BUDGET: ", not divided further (budget)",
    }[one.resolution]
    return f"{layers} lose{'' if len(one.layers) > 1 else 's'} ({gap_text(one.reading.comparison)}){note}"


def _remedy(found: Findings, recipe: Recipe, cost: Callable[[Recipe], Cost]) -> list[str]:
    if found.remedy is None:
        if not found.tried:
            return []
        best, reading = min(found.tried, key=lambda one: _upper(one[1]))
        return [
            f"none of {len(found.tried)} remedies passes; nearest: {best.label}, {gap_text(reading.comparison)}; "
            "BF16 remains"
        ]
    candidate, reading = found.remedy
    before, after, plain = cost(recipe), candidate.cost, cost(_bf16(recipe))
    return [
        f"passes: {candidate.label}, {gap_text(reading.comparison)}; costs {bytes_text(after, before)} beside "
        f"the recipe as it is, saves {saving_text(plain, after)} beside BF16",
        CHOSEN_HERE,
    ]


def bytes_text(after: Cost, before: Cost) -> str:
    """What one recipe takes more than another."""
    weights = after.weights_bytes - before.weights_bytes
    kv = after.kv_bytes_per_token - before.kv_bytes_per_token
    return f"{weights:+,} B of weights and {kv:+,} B of KV cache a token"


def saving_text(plain: Cost, after: Cost) -> str:
    weights = plain.weights_bytes - after.weights_bytes
    return f"{weights:,} B of weights and {plain.kv_bytes_per_token - after.kv_bytes_per_token:,} B of KV cache a token"


def _bf16(recipe: Recipe) -> Recipe:
    return in_bf16(in_bf16(recipe, Part.EXPERTS), Part.KV)


def _upper(reading: Reading) -> float:
    return 1.0 if reading.comparison.upper is None else reading.comparison.upper
