"""One question of the search: a recipe to answer all queries under."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trace_serve.recipe import Recipe


class Stage(StrEnum):
    """What a trial is for."""

    WHOLE = "whole recipe"
    PARTS = "parts"
    ACTIVATIONS = "activations"
    LAYERS = "layers"
    REMEDIES = "remedies"


@dataclass(frozen=True)
class Trial:
    """A recipe that the search wants a reading of."""

    stage: Stage
    label: str
    recipe: Recipe
