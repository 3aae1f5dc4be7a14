"""Where the tokens of the two arms' answers part, over all pairs of answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from eval_gate.arms.records import SampleRecord
from eval_gate.attribute.tokens import AnswerTokens, answer_tokens
from eval_gate.pairing import Pair
from eval_gate.verdict import Divergence, KindDivergence, TokenBin, TokenDifference

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def token_divergence(pairs: Iterable[Pair]) -> Divergence | None:
    """The divergence of all pairs whose tokens both arms recorded; None if there is none."""
    answered = compared = 0
    lengths = [0, 0]
    units: set[str] = set()
    places: dict[str, list[int]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for pair in pairs:
        for one, two in zip(pair.training, pair.serving, strict=True):
            if one is None or two is None or one.text is None or two.text is None:
                continue
            answered += 1
            found = _both(one, two)
            if found is None:
                continue
            left, right, unit = found
            compared += 1
            units.add(unit)
            lengths[0] += len(left)
            lengths[1] += len(right)
            counts[pair.query.kind] += 1
            if left != right:
                places[pair.query.kind].append(first_difference(left, right))
    if not compared:
        return None
    every = sorted(place for found in places.values() for place in found)
    return Divergence(
        unit="tokens" if "tokens" in units else "token ids",
        answered=answered,
        pairs=compared,
        diverged=len(every),
        quantiles={f"{share:g}": _quantile(every, share) for share in QUANTILES} if every else {},
        bins=_bins(every),
        training_tokens=lengths[0] / compared,
        serving_tokens=lengths[1] / compared,
        kinds={
            kind: KindDivergence(
                pairs=count,
                diverged=len(places[kind]),
                median=_quantile(sorted(places[kind]), 0.5) if places[kind] else None,
            )
            for kind, count in sorted(counts.items())
        },
    )


def token_difference(training: SampleRecord, serving: SampleRecord) -> TokenDifference | None:
    """The first token in which two answers differ; None if an arm did not record tokens, or if none differs."""
    found = _both(training, serving)
    if found is None:
        return None
    left, right, _ = found
    index = first_difference(left, right)
    if index == len(left) == len(right):
        return None
    return TokenDifference(
        index=index,
        training=_shown(answer_tokens(training), left, index),
        serving=_shown(answer_tokens(serving), right, index),
    )


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Index of the first element in which two sequences differ; the shorter length when one begins the other."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _both(one: SampleRecord, two: SampleRecord) -> tuple[tuple[Any, ...], tuple[Any, ...], str] | None:
    """Both answers as tokens of one unit, and that unit."""
    if one.response is None or two.response is None:
        return None
    left, right = answer_tokens(one), answer_tokens(two)
    if left.unit == right.unit and left.unit != "words":
        return left.tokens, right.tokens, left.unit
    texts = [tokens.texts if tokens.unit == "token ids" else tokens.tokens for tokens in (left, right)]
    if "words" in (left.unit, right.unit) or texts[0] is None or texts[1] is None:
        return None
    return texts[0], texts[1], "tokens"


def _shown(tokens: AnswerTokens, compared: Sequence[Any], index: int) -> str | None:
    if index >= len(compared):
        return None
    if tokens.texts is not None:
        return tokens.texts[index]
    token = compared[index]
    return token if isinstance(token, str) else f"id {token}"


def _quantile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _bins(ordered: Sequence[int]) -> tuple[TokenBin, ...]:
    """Bins [0, 0], [1, 2], [3, 6], [7, 14], ... up to the largest value."""
    bins = []
    first, width = 0, 1
    while ordered and first <= ordered[-1]:
        last = first + width - 1
        bins.append(TokenBin(first=first, last=last, pairs=sum(first <= place <= last for place in ordered)))
        first, width = last + 1, 2 * width
    return tuple(bins)
