"""The queries whose grade flipped between the arms, for readers of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from eval_gate.arms.records import SampleRecord
from eval_gate.divergence import first_difference, token_difference
from eval_gate.pairing import Pair
from eval_gate.verdict import FlippedQuery

MAX_TEXT_CHARS = 4000
MAX_FLIPS_BYTES = 16 << 20
"""JSON of all flips of a verdict, which is signed and read whole; every exchange is in results.jsonl anyway."""


def flipped_queries(pairs: Iterable[Pair]) -> tuple[FlippedQuery, ...]:
    """Scored queries that only one arm passes, lost ones first, as many as `MAX_FLIPS_BYTES` hold.

    With repeats the first disagreeing sample is shown.
    """
    found: list[FlippedQuery] = []
    left = MAX_FLIPS_BYTES
    for pair in sorted((pair for pair in pairs if _flipped(pair)), key=lambda pair: pair.difference < 0):
        flip = _shown_flip(pair)
        left -= _size(flip)
        if left < 0:
            break
        found.append(flip)
    return tuple(found)


def count_flipped(pairs: Iterable[Pair]) -> int:
    """All queries that only one arm passes."""
    return sum(map(_flipped, pairs))


def _flipped(pair: Pair) -> bool:
    return pair.scored and pair.difference != 0


def _shown_flip(pair: Pair) -> FlippedQuery:
    one, two = _disagreeing(pair)
    left, right = _shown(one.text), _shown(two.text)
    return FlippedQuery(
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
        first_different_token=token_difference(one, two),
    )


def _disagreeing(pair: Pair) -> tuple[SampleRecord, SampleRecord]:
    wanted = pair.difference > 0
    samples = [(a, b) for a, b in zip(pair.training, pair.serving, strict=True) if a is not None and b is not None]
    return next(((a, b) for a, b in samples if a.passed is wanted and b.passed is not wanted), samples[0])


def _shown(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"


def _size(flip: FlippedQuery) -> int:
    texts: Sequence[str] = (flip.id, flip.prompt, flip.expected, flip.training_answer, flip.serving_answer)
    return 400 + sum(len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")) for text in texts)
