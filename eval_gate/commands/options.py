"""Options that several commands share; their defaults are those of `GatePolicy` and `PoolLimits`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eval_gate.policy import GatePolicy
from trace_serve.errors import ConfigError

DEFAULT = GatePolicy()


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


class Api(StrEnum):
    """Routes of `--api`."""

    CHAT = "chat"
    COMPLETIONS = "completions"


Margin = Annotated[float, typer.Option(help="Largest acceptable loss of pass rate; 0.05 is 5 points.")]
MarginOf = Annotated[
    MarginKind, typer.Option(help="absolute: points of pass rate; relative: a share of the training pass rate.")
]
Alpha = Annotated[float, typer.Option(help="One-sided error rate of PASS and of BLOCK.")]
RuleOption = Annotated[Rule, typer.Option(help="ci: confidence bounds; point: the measured gap alone.")]
ModeOption = Annotated[Mode, typer.Option(help="Claim about queries like these, or exactly these.")]
Looks = Annotated[int, typer.Option(help="Judge after each of so many equal parts, and stop on a clear case.")]
SpendingOption = Annotated[Spending, typer.Option(help="obf: strict early looks; pocock: equal ones.")]
ErrorCap = Annotated[float, typer.Option(help="Largest share of samples without a grade.")]
BaselineFloor = Annotated[float, typer.Option(help="Smallest pass rate of the training arm.")]
DegenerateCap = Annotated[float, typer.Option(help="Largest excess of the serving arm's degenerate answers.")]
TruncationCap = Annotated[float, typer.Option(help="Largest excess of the serving arm's truncated answers.")]
ValidDays = Annotated[float, typer.Option(help="Days until the verdict expires.")]

Queries = Annotated[str, typer.Option(help="A query file, or the name of a suite.")]
Suites = Annotated[
    list[str] | None,
    typer.Option(
        help="Instead of --queries, several times for several: support, support-dev, aime24, aime25, aime26, "
        "reasoning-gym:TASK:COUNT:SEED, or a file."
    ),
]
MaxQueries = Annotated[int | None, typer.Option(help="Size of a seeded random subsample.")]
Seed = Annotated[int, typer.Option(help="Seed of the subsample and of the order.")]
Repeats = Annotated[int, typer.Option(help="Samples of each query and arm.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
ApiOption = Annotated[Api, typer.Option(help="Route; completions has no chat template.")]

MaxWall = Annotated[float | None, typer.Option(min=0, help="Seconds after which it asks nothing more.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight at one arm.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds for one attempt at one answer.")]
StartupTimeout = Annotated[float, typer.Option(min=1, help="Seconds for an engine to start.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run in --out.")]

AllowCode = Annotated[bool, typer.Option(help="Run programs that a model wrote (checker code).")]
AllowChecker = Annotated[list[str] | None, typer.Option(help="A checker module:function to allow.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def api_key(variable: str | None, flag: str) -> str | None:
    """The key in an environment variable; keys are never given on the command line or in a file.

    Raises:
        ConfigError: the variable is named but not set.
    """
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"--{flag} {variable}: not set in the environment, expected the API key", field="key_env")
    return value


def import_directory(allowed: list[str] | None) -> Path | None:
    """Where checker functions that were allowed by name may be imported from."""
    return Path.cwd() if allowed else None
