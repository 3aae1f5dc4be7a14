"""The search: a generator of trials that knows nothing of engines, so that any evaluator can answer it.

    search = Search(...)
    findings = await drive(search.run(), evaluate)

Stages: the whole recipe; each part alone; the experts' weights without their activations; bisection over layers; then
remedies until one passes by the gate's own rule. Each trial costs one engine. What is left after the first three
stages is shared: two thirds for the layers, the rest for remedies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from eval_gate.attribute.cost import Cost
from eval_gate.attribute.layers import LayerSet, bisect
from eval_gate.attribute.readings import Reading, Standing
from eval_gate.attribute.remedies import Candidate, ladder
from eval_gate.attribute.trials import Stage, Trial
from eval_gate.attribute.variants import (
    Layout,
    Part,
    describe,
    layer_text,
    limited_to,
    only,
    quantized_layers,
    weights_only,
)
from eval_gate.stats.rule import Outcome
from trace_serve.recipe import Recipe

Asking = Generator[Trial, Reading | None, Reading | None]
_BOTH_HALVES = 2


@dataclass
class Findings:
    """What the search knows when it ends.

    Attributes:
        whole: of the recipe as it is; None when not even that was tried.
        parts: of each part alone in FP4, None where it was not tried; empty unless the recipe has several and loses.
        suspects: parts that are not shown to be within the margin, the worst first.
        weights: of the experts' weights alone, their inputs in BF16.
        layers: by part, the sets that lose.
        tried: remedies in the order in which they were tried.
        remedy: the first that passes.
        left_out: remedies that were not tried, with the reason.
        stopped: `engines` or `wall` when the budget ended the search.
    """

    whole: Reading | None = None
    parts: dict[Part, Reading | None] = field(default_factory=dict)
    suspects: tuple[Part, ...] = ()
    weights: Reading | None = None
    layers: dict[Part, list[LayerSet]] = field(default_factory=dict)
    tried: list[tuple[Candidate, Reading]] = field(default_factory=list)
    remedy: tuple[Candidate, Reading] | None = None
    left_out: list[str] = field(default_factory=list)
    stopped: str | None = None


class Search:
    """One search.

    Args:
        recipe: whose gap is to be explained.
        layout: of the model.
        engines: trials at most.
        cost: bytes under a recipe.
        refuses: why an engine would not serve the model under a recipe; None if it would.
        too_few: why no recipe can pass with these queries, so that remedies need not be tried; None if one can.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        *,
        engines: int,
        cost: Callable[[Recipe], Cost],
        refuses: Callable[[Recipe], str | None] = lambda recipe: None,
        too_few: str | None = None,
    ) -> None:
        self._recipe = recipe
        self._layout = layout
        self._left = engines
        self._kept = 0
        self._cost = cost
        self._refuses = refuses
        self._too_few = too_few
        self._readings: dict[str, Reading] = {}
        self._found = Findings()

    def run(self) -> Generator[Trial, Reading | None, Findings]:
        """Yields trials and takes their readings; None for a reading ends the search (the time is up)."""
        found = self._found
        found.whole = yield from self._ask(Stage.WHOLE, self._recipe)
        if found.whole is None or found.whole.outcome is Outcome.PASS:
            return found
        yield from self._try_parts(found.whole)
        if Part.EXPERTS in found.suspects and self._recipe.experts == "w4a4":
            found.weights = yield from self._ask(Stage.ACTIVATIONS, weights_only(only(self._recipe, Part.EXPERTS)))
        yield from self._try_layers()
        yield from self._try_remedies()
        return found

    def _ask(self, stage: Stage, recipe: Recipe, label: str | None = None) -> Asking:
        known = self._readings.get(recipe.recipe_id)
        if known is not None:
            return known
        if self._left <= self._kept:
            self._found.stopped = self._found.stopped or "engines"
            return None
        self._left -= 1
        reading = yield Trial(stage, label or describe(recipe, self._layout), recipe)
        if reading is None:
            self._left, self._found.stopped = 0, "wall"
            return None
        self._readings[recipe.recipe_id] = reading
        return reading

    def _try_parts(self, whole: Reading) -> Generator[Trial, Reading | None, None]:
        found = self._found
        there = [part for part in Part if quantized_layers(self._recipe, part, self._layout)]
        if len(there) == 1:
            found.suspects = (there[0],)
            self._readings[only(self._recipe, there[0]).recipe_id] = whole
            return
        for part in (Part.KV, Part.EXPERTS):
            found.parts[part] = yield from self._ask(Stage.PARTS, only(self._recipe, part))
        standings = {part: self._standing(part) for part in there}
        suspects = [part for part in there if standings[part] is not Standing.CLEAR] or there
        order = [Standing.GUILTY, Standing.UNTESTED, Standing.UNCLEAR, Standing.CLEAR]
        found.suspects = tuple(sorted(suspects, key=lambda part: (order.index(standings[part]), -self._gap(part))))

    def _alone(self, part: Part) -> Reading | None:
        return self._readings.get(only(self._recipe, part).recipe_id)

    def _standing(self, part: Part) -> Standing:
        reading = self._alone(part)
        return Standing.UNTESTED if reading is None else reading.standing

    def _gap(self, part: Part) -> float:
        reading = self._alone(part)
        return 0.0 if reading is None else reading.gap

    def _try_layers(self) -> Generator[Trial, Reading | None, None]:
        floor = 0 if self._too_few else self._left // 3
        for part in self._found.suspects:
            reading = self._alone(part)
            if reading is None or reading.standing is not Standing.GUILTY:
                continue
            alone = only(self._recipe, part)

            def ask(layers: tuple[int, ...], part: Part = part, alone: Recipe = alone) -> Asking:
                recipe = limited_to(alone, part, layers, self._layout)
                return self._ask(Stage.LAYERS, recipe, f"{part.words} in layers {layer_text(layers)}")

            layers = quantized_layers(self._recipe, part, self._layout)
            self._found.layers[part] = yield from bisect(
                layers, reading, ask, lambda: self._left - floor >= _BOTH_HALVES
            )

    def _losing(self, part: Part) -> list[tuple[int, ...]]:
        """Sets of layers that lose, the worst first; none if that is all of them."""
        sets = sorted(self._found.layers.get(part, []), key=lambda one: (-one.reading.gap, one.layers))
        everywhere = quantized_layers(self._recipe, part, self._layout)
        return [one.layers for one in sets if one.layers != everywhere]

    def _ladder(self, recipe: Recipe, part: Part) -> list[Candidate]:
        found, left_out = ladder(recipe, part, self._layout, self._losing(part), self._cost, self._refuses)
        self._found.left_out += [reason for reason in left_out if reason not in self._found.left_out]
        return found

    def _try_remedies(self) -> Generator[Trial, Reading | None, None]:
        suspects = self._found.suspects
        if self._too_few is not None:
            self._found.left_out.append(self._too_few)
            return
        if len(suspects) == 1:
            self._found.remedy = yield from self._first_passing(self._ladder(self._recipe, suspects[0]))
            return
        first, second = suspects
        alone = {}
        for part in (first, second):
            steps = self._ladder(only(self._recipe, part), part)
            if self._standing(part) is Standing.CLEAR:
                # It is within the margin by itself; what it adds to the other part is seen when they are put together.
                steps.insert(0, Candidate("as it is", only(self._recipe, part), self._cost(only(self._recipe, part))))
            # One part must not use up what the other needs.
            self._kept = self._left // 2 if part is first else 0
            chosen = yield from self._first_passing(steps)
            self._kept = 0
            # The last step is the part in BF16.
            alone[part] = steps[-1:] if chosen is None else steps[steps.index(chosen[0]) :]
        self._found.remedy = yield from self._first_passing(self._together(alone))

    def _together(self, alone: dict[Part, list[Candidate]]) -> list[Candidate]:
        """Every pair of a remedy of each part that may pass, by rising cost; the last are those of one part alone."""
        pairs = []
        for one in alone[Part.EXPERTS]:
            for two in alone[Part.KV]:
                recipe = _joined(one.recipe, two.recipe)
                if not recipe.is_bf16:
                    pairs.append(Candidate(_joined_label(one, two), recipe, self._cost(recipe)))
        return sorted(pairs, key=lambda one: one.cost.total_bytes)

    def _first_passing(
        self, candidates: Sequence[Candidate]
    ) -> Generator[Trial, Reading | None, tuple[Candidate, Reading] | None]:
        for candidate in candidates:
            if candidate.recipe.is_bf16 or candidate.recipe == self._recipe:
                continue
            blocked = self._blocked_by(candidate.recipe)
            if blocked is not None:
                reason = f"{candidate.label}: with the other part in BF16, its {blocked.words} already block"
                if reason not in self._found.left_out:
                    self._found.left_out.append(reason)
                continue
            reading = yield from self._ask(Stage.REMEDIES, candidate.recipe, candidate.label)
            if reading is None:
                # The budget is spent, but a dearer remedy may be known from an earlier stage.
                continue
            self._found.tried.append((candidate, reading))
            if reading.outcome is Outcome.PASS:
                return candidate, reading
        return None

    def _blocked_by(self, recipe: Recipe) -> Part | None:
        """A part of the recipe that blocks with the other in BF16, as far as that was tried."""
        for part in Part:
            alone = only(recipe, part)
            reading = self._readings.get(alone.recipe_id)
            if alone != recipe and reading is not None and reading.outcome is Outcome.BLOCK:
                return part
        return None


def _joined(experts: Recipe, kv: Recipe) -> Recipe:
    """The experts of one recipe with the KV cache of another."""
    return replace(
        experts,
        kv=kv.kv,
        kv_layers=kv.kv_layers,
        k_rotation=kv.k_rotation,
        k_global_scale=kv.k_global_scale,
        v_global_scale=kv.v_global_scale,
    )


def _joined_label(experts: Candidate, kv: Candidate) -> str:
    return f"{experts.label}; {kv.label}"


async def drive(
    search: Generator[Trial, Reading | None, Findings], evaluate: Callable[[Trial], Awaitable[Reading | None]]
) -> Findings:
    """Answers every trial of a search with `evaluate`, and returns what the search found."""
    try:
        trial = next(search)
        while True:
            trial = search.send(await evaluate(trial))
    except StopIteration as end:
        findings: Findings = end.value
        return findings
