"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Rule(StrEnum):
    """Decision rules of `--rule`."""

    CI = "ci"
    POINT = "point"


class MarginKind(StrEnum):
    """What `--margin` is a share of."""

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class Spending(StrEnum):
    """Bounds of several looks, for `--spending`."""

    OBF = "obf"
    POCOCK = "pocock"


class Mode(StrEnum):
    """Claims of `--mode`."""

    POPULATION = "population"
    FIXED_SET = "fixed-set"


Margin = Annotated[float, typer.Option(help="Largest acceptable loss of pass rate; 0.05 is 5 points.")]
MarginOf = Annotated[
    MarginKind, typer.Option(help="absolute: points of pass rate; relative: a share of the training pass rate.")
]
Alpha = Annotated[float, typer.Option(help="One-sided error rate of PASS and of BLOCK.")]
RuleOption = Annotated[Rule, typer.Option(help="ci: confidence bounds; point: the measured gap alone.")]
ModeOption = Annotated[Mode, typer.Option(help="Claim about queries like these, or exactly these.")]
ErrorCap = Annotated[float, typer.Option(help="Largest share of samples without a grade.")]
BaselineFloor = Annotated[float, typer.Option(help="Smallest pass rate of the training arm.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
