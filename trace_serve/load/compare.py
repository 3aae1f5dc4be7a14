"""Two arms under the same schedule in interleaved blocks: BF16 against FP4, or hints on against off."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from trace_serve.load.bootstrap import Floats, Ratio, Statistic, ratio
from trace_serve.load.plan import LoadPlan
from trace_serve.load.report import LoadReport, Verdict

FEW_ROUNDS = 5


class Arm(BaseModel):
    """Attributes:
    name: what the table calls it.
    host: base URL.
    changes: fields of the plan that differ from the other arm's.
    """

    name: str
    host: str
    changes: dict[str, str] = {}


class Comparison(BaseModel):
    """Ratios are B over A: above 1, B is slower, or faster for tokens/s."""

    schema_version: int = 1
    a: Arm
    b: Arm
    rounds: int
    pairs: int
    ratios: list[Ratio]
    notes: list[str]
    invalid: list[str]
    missed: list[str]

    @property
    def exit_code(self) -> int:
        verdict = Verdict.INVALID if self.invalid else Verdict.MISSED if self.missed else Verdict.MET
        return verdict.exit_code


RunBlock = Callable[[Arm, LoadPlan, Path], LoadReport]
"""Runs one block into a directory."""


def compare(a: Arm, b: Arm, plan: LoadPlan, rounds: int, out: Path, run: RunBlock) -> Comparison:
    """Runs `rounds` blocks of each arm, A first in even rounds and B first in odd ones.

    Both blocks of a round have the same seed, thus the same arrivals and requests; each round has another.
    """
    blocks: list[tuple[Path, Path]] = []
    notes, invalid, missed = [], [], []
    digests: dict[str, set[str]] = {a.name: set(), b.name: set()}
    for number in range(rounds):
        of_round: dict[str, Path] = {}
        for arm in (a, b) if number % 2 == 0 else (b, a):
            directory = out / f"round-{number + 1}-{arm.name}"
            block = LoadPlan.model_validate(
                {**plan.model_dump(mode="json", exclude_unset=True), **arm.changes, "seed": plan.seed + number}
            )
            report = run(arm, block, directory)
            place = f"round {number + 1}, {arm.name}"
            invalid += [f"{place}: {reason}" for reason in report.invalid]
            missed += [f"{place}: {check.name}" for check in report.checks if not check.met]
            digests[arm.name] |= {f"{each.digest} {each.weight_version}" for each in report.versions}
            of_round[arm.name] = directory / "requests.csv"
        blocks.append((of_round[a.name], of_round[b.name]))
    invalid += [f"{name}: more than one version answered: {', '.join(sorted(seen))}" for name, seen in digests.items()
                if len(seen) > 1]  # fmt: skip
    if rounds < FEW_ROUNDS:
        notes.append(f"{rounds} rounds: intervals are rough, give --rounds {FEW_ROUNDS} or more")
    pairs = [_pair(first, second) for first, second in blocks]
    if any(not pair for pair in pairs):
        invalid.append("a round has no arrival that both arms answered")
    usable = [pair for pair in pairs if pair]
    return Comparison(
        a=a,
        b=b,
        rounds=rounds,
        pairs=sum(map(len, usable)),
        ratios=_ratios(usable, plan.seed) if usable else [],
        notes=notes,
        invalid=invalid,
        missed=missed,
    )


Values = dict[str, float]


def _pair(first: Path, second: Path) -> list[tuple[Values, Values]]:
    """Arrivals that both arms answered in full, in order."""
    a, b = _answered(first), _answered(second)
    return [(a[index], b[index]) for index in sorted(a.keys() & b.keys())]


def _answered(path: Path) -> dict[int, Values]:
    found = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["outcome"] != "ok" or row["client"] != "plain":
                continue
            sent, first, end = (float(row[name]) for name in ("sent_s", "first_s", "end_s"))
            tokens = int(row["completion_tokens"])
            values = {"TTFT": first - sent, "E2E": end - sent, "tokens": float(tokens)}
            if tokens > 1:
                values["TPOT"] = (end - first) / (tokens - 1)
            found[int(row["index"])] = values
    return found


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=-1))


def _median(values: Floats) -> Floats:
    return np.asarray(np.median(values, axis=-1))


def _p95(values: Floats) -> Floats:
    return np.asarray(np.quantile(values, 0.95, axis=-1))


STATISTICS: tuple[tuple[str, str, Statistic, float], ...] = (
    ("TTFT mean ms", "TTFT", _mean, 1000),
    ("TTFT p50 ms", "TTFT", _median, 1000),
    ("TTFT p95 ms", "TTFT", _p95, 1000),
    ("TPOT mean ms", "TPOT", _mean, 1000),
    ("TPOT p50 ms", "TPOT", _median, 1000),
    ("E2E mean ms", "E2E", _mean, 1000),
    ("E2E p95 ms", "E2E", _p95, 1000),
    ("tokens an answer", "tokens", _mean, 1),
)
"""From the actual send, so that neither arm pays for a late generator."""


def _ratios(rounds: list[list[tuple[Values, Values]]], seed: int) -> list[Ratio]:
    ratios = []
    for name, metric, statistic, scale in STATISTICS:
        blocks = []
        for pairs in rounds:
            both = [(a[metric] * scale, b[metric] * scale) for a, b in pairs if metric in a and metric in b]
            if both:
                array = np.array(both)
                blocks.append((array[:, 0], array[:, 1]))
        if len(blocks) == len(rounds):
            ratios.append(ratio(name, blocks, statistic, seed))
    return ratios
