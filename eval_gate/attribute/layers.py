"""Which layers carry a loss: bisection over layer sets."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum

from eval_gate.attribute.readings import Reading, Standing
from eval_gate.attribute.trials import Trial

Ask = Callable[[tuple[int, ...]], Generator[Trial, Reading | None, Reading | None]]


class Resolution(StrEnum):
    """Why a set of layers was not divided further."""

    SINGLE = "one layer"
    SHARED = "shown together, in neither half alone"
    BUDGET = "budget ended"


@dataclass(frozen=True)
class LayerSet:
    """Layers that lose when they alone are in FP4."""

    layers: tuple[int, ...]
    reading: Reading
    resolution: Resolution


def bisect(
    layers: tuple[int, ...], reading: Reading, ask: Ask, may_ask: Callable[[], bool]
) -> Generator[Trial, Reading | None, list[LayerSet]]:
    """Halves every set that loses until it is one layer, its halves do not lose by themselves, or the budget ends.

    Both halves are tried, because both may lose; of all open sets the one with the largest gap goes first, the one
    with lower layers on a tie.

    Args:
        layers: in FP4 together, `reading` says that they lose.
        ask: tries a set of layers; None when the budget is spent.
        may_ask: whether there are engines for both halves of a set.

    Returns:
        Sets that lose, in the order of their layers.
    """
    open_sets, found = [(layers, reading)], []
    while open_sets:
        open_sets.sort(key=lambda one: (-one[1].gap, one[0]))
        chosen, known = open_sets.pop(0)
        if len(chosen) == 1:
            found.append(LayerSet(chosen, known, Resolution.SINGLE))
            continue
        if not may_ask():
            found.append(LayerSet(chosen, known, Resolution.BUDGET))
            continue
        middle = len(chosen) // 2
        halves = []
        for half in (chosen[:middle], chosen[middle:]):
            told = yield from ask(half)
            if told is not None:
                halves.append((half, told))
        losing = [one for one in halves if one[1].standing is Standing.GUILTY]
        if losing:
            open_sets += losing
        else:
            resolution = Resolution.SHARED if len(halves) == 2 else Resolution.BUDGET
            found.append(LayerSet(chosen, known, resolution))
    return sorted(found, key=lambda one: one.layers)
