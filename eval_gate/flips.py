"""The queries whose grade flipped between the arms, for readers of a report."""

from __future__ import annotations

from collections.abc import Sequence

from eval_gate.arms.records import SampleRecord
from eval_gate.pairing import Pair
from eval_gate.verdict import FlippedQuery

MAX_TEXT_CHARS = 4000


def flipped_queries(pairs: Sequence[Pair]) -> tuple[FlippedQuery, ...]:
    """Scored queries that only one arm passes, lost ones first. With repeats the first disagreeing sample is shown."""
    found = []
    for pair in pairs:
        if not pair.scored or pair.difference == 0:
            continue
        one, two = _disagreeing(pair)
        left, right = _shown(one.text), _shown(two.text)
        found.append(
            FlippedQuery(
                id=pair.query.id,
                suite=pair.query.suite,
                kind=pair.query.kind,
                direction="lost" if pair.difference > 0 else "gained",
                prompt=_shown(pair.query.prompt_text),
                expected=_shown(pair.query.expected_text),
                training_answer=left,
                serving_answer=right,
                first_difference=first_difference(left, right),
                first_different_word=first_difference(left.split(), right.split()),
            )
        )
    return tuple(sorted(found, key=lambda flip: flip.direction != "lost"))


def first_difference(left: Sequence[str], right: Sequence[str]) -> int:
    """Index of the first element in which two sequences differ; the shorter length when one begins the other."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _disagreeing(pair: Pair) -> tuple[SampleRecord, SampleRecord]:
    wanted = pair.difference > 0
    samples = [(a, b) for a, b in zip(pair.training, pair.serving, strict=True) if a is not None and b is not None]
    return next(((a, b) for a, b in samples if a.passed is wanted and b.passed is not wanted), samples[0])


def _shown(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"
