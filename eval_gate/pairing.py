"""Pairs the two arms' samples by query id; nothing is dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import ErrorClass, Role, SampleRecord
from eval_gate.degenerate import is_degenerate
from eval_gate.looks import Unit
from eval_gate.preflight import Finding
from eval_gate.verdict import ArmSummary


class Item(Unit, Protocol):
    """What judging needs to know of a query; `queries.Query` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def prompt_text(self) -> str: ...
    @property
    def expected_text(self) -> str: ...


class ItemSet(Protocol):
    """Queries with the digest of the file that they came from; `queries.QuerySet` is one."""

    @property
    def queries(self) -> Sequence[Item]: ...
    @property
    def digest(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class ArmResults:
    """Everything that was gathered from one arm; `findings` are what its prompts showed before it was sampled."""

    evidence: ArmEvidence
    samples: Sequence[SampleRecord]
    findings: Sequence[Finding] = ()


@dataclass(frozen=True)
class Pair:
    """One query with all its samples of both arms; a sample that never came is None."""

    query: Item
    training: tuple[SampleRecord | None, ...]
    serving: tuple[SampleRecord | None, ...]

    @property
    def training_rate(self) -> float:
        return _rate(self.training)

    @property
    def serving_rate(self) -> float:
        return _rate(self.serving)

    @property
    def difference(self) -> float:
        """Training pass rate less serving pass rate; NaN unless every sample of both arms has a grade."""
        return self.training_rate - self.serving_rate

    @property
    def scored(self) -> bool:
        return not math.isnan(self.difference)


def pair_up(queries: Sequence[Item], records: Iterable[SampleRecord], repeats: int) -> list[Pair]:
    """One pair a query, in the queries' order. A later record of the same sample replaces an earlier one."""
    latest: dict[tuple[Role, str, int], SampleRecord] = {}
    for record in records:
        latest[record.role, record.query_id, record.sample] = record
    return [
        Pair(
            query,
            tuple(latest.get((Role.TRAINING, query.id, k)) for k in range(repeats)),
            tuple(latest.get((Role.SERVING, query.id, k)) for k in range(repeats)),
        )
        for query in queries
    ]


def summarize(samples: Iterable[SampleRecord | None]) -> ArmSummary:
    """Counts of one arm; a missing sample is an error of class `missing`."""
    total = passed = failed = truncated = degenerate = attempts = 0
    unscored: Counter[str] = Counter()
    lengths: list[int] = []
    for record in samples:
        total += 1
        if record is None:
            unscored[ErrorClass.MISSING] += 1
            continue
        attempts += record.attempts
        if record.passed is None:
            unscored[record.failure.kind if record.failure else ErrorClass.MISSING] += 1
        elif record.passed:
            passed += 1
        else:
            failed += 1
        truncated += record.finish_reason == "length"
        degenerate += is_degenerate(record.text or "", record.finish_reason, record.completion_tokens)
        if record.completion_tokens is not None:
            lengths.append(record.completion_tokens)
    without = sum(unscored.values())
    return ArmSummary(
        samples=total,
        passed=passed,
        failed=failed,
        unscored={str(kind): count for kind, count in sorted(unscored.items())},
        pass_rate=passed / total if total and not without else None,
        pass_rate_low=passed / total if total else None,
        pass_rate_high=(passed + without) / total if total else None,
        truncated=truncated,
        degenerate=degenerate,
        mean_completion_tokens=sum(lengths) / len(lengths) if lengths else None,
        attempts=attempts,
    )


def first_samples(pairs: Iterable[Pair], role: Role) -> Mapping[str, SampleRecord]:
    """The first sample of each query that one arm answered."""
    out = {}
    for pair in pairs:
        record = (pair.training if role is Role.TRAINING else pair.serving)[0]
        if record is not None:
            out[pair.query.id] = record
    return out


def _rate(samples: tuple[SampleRecord | None, ...]) -> float:
    passed = 0
    for record in samples:
        if record is None or record.passed is None:
            return math.nan
        passed += record.passed
    return passed / len(samples) if samples else math.nan
