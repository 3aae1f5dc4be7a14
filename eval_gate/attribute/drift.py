"""How far the answers under a recipe move from the BF16 answers, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from pydantic import BaseModel, ConfigDict

from eval_gate.arms.records import SampleRecord
from eval_gate.attribute.tokens import AnswerTokens, answer_tokens
from eval_gate.divergence import first_difference
from eval_gate.pairing import Pair
from eval_gate.verdict import Score


class TokenDrift(BaseModel):
    """Over all pairs of answers. What was not recorded is None, never 0.

    Up to the first token in which two answers differ both arms saw the same context, so their log-probabilities of
    the same tokens compare; after it they do not. At temperature 0 those tokens are each the most likely one and no
    sample, so the KL estimates are of the greedy path.

    Attributes:
        pairs: pairs of answers that both arms gave.
        identical: pairs without a difference.
        unit: what the place of a difference counts: `token ids`, `tokens`, or `words`; the coarsest of all pairs.
        first_difference: median index of the first different token, over the pairs that differ.
        positions: tokens before the first difference that have log-probabilities in both arms.
        mean_abs_logprob: mean of |log p - log q| over them.
        kl_k1: mean of log p - log q over them, p of BF16: unbiased for KL(p, q) under sampling, and may be negative.
        kl_k3: mean of r - 1 - log r with r = q / p: never negative, of smaller variance.
        top1: share of positions with the same context, the differing one included, whose most likely token is the same.
        router: share of routed experts that are the same, over tokens with the same context and all layers.

    Source of the estimators: J. Schulman, "Approximating KL Divergence", 2020.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int
    identical: int
    unit: str | None
    first_difference: Score
    positions: int
    mean_abs_logprob: Score
    kl_k1: Score
    kl_k3: Score
    top1: Score
    router: Score


def token_drift(pairs: Iterable[Pair], *, routing: tuple[int, int]) -> TokenDrift:
    """The drift of the serving answers from the training answers.

    Args:
        routing: layers, and routed experts of a token in each: the shape of a row of recorded routes.
    """
    answered = [(one, two) for pair in pairs for one, two in _both(pair)]
    places: list[int] = []
    units: set[str] = set()
    log_p: list[float] = []
    log_q: list[float] = []
    agree: list[bool] = []
    routes: list[float] = []
    identical = 0
    for one, two in answered:
        left, right = answer_tokens(one), answer_tokens(two)
        if left.unit != right.unit:
            left, right = _as_words(left, one), _as_words(right, two)
        units.add(left.unit)
        same = first_difference(left.tokens, right.tokens)
        if left.tokens == right.tokens:
            identical += 1
        else:
            places.append(same)
        if left.logprobs is not None and right.logprobs is not None:
            log_p += left.logprobs[:same].tolist()
            log_q += right.logprobs[:same].tolist()
        if left.top is not None and right.top is not None:
            shared = min(same + 1, len(left.top), len(right.top))
            agree += [left.top[place] == right.top[place] for place in range(shared)]
        routes += _routes(left, right, same, routing)
    ratio = np.array(log_q) - np.array(log_p)
    coarsest = next((unit for unit in ("words", "tokens", "token ids") if unit in units), None)
    return TokenDrift(
        pairs=len(answered),
        identical=identical,
        unit=coarsest,
        first_difference=median(places) if places else None,
        positions=len(ratio),
        mean_abs_logprob=_mean(np.abs(ratio).tolist()),
        kl_k1=_mean((-ratio).tolist()),
        kl_k3=_mean((np.expm1(ratio) - ratio).tolist()),
        top1=_mean(agree),
        router=_mean(routes),
    )


def _both(pair: Pair) -> list[tuple[SampleRecord, SampleRecord]]:
    return [
        (one, two)
        for one, two in zip(pair.training, pair.serving, strict=True)
        if one is not None and two is not None and one.text is not None and two.text is not None
    ]


def _as_words(tokens: AnswerTokens, record: SampleRecord) -> AnswerTokens:
    return AnswerTokens("words", tuple((record.text or "").split()), None, None, None, tokens.routed, tokens.prompt)


def _routes(left: AnswerTokens, right: AnswerTokens, same: int, routing: tuple[int, int]) -> list[float]:
    """Share of equal experts of each token that both arms saw after the same tokens."""
    if left.routed is None or right.routed is None or left.prompt is None or left.prompt != right.prompt:
        return []
    size = math.prod(routing)
    if left.unit != "token ids" or len(left.routed) % size or len(right.routed) % size:
        return []
    seen = left.prompt + same
    one, two = left.routed.reshape(-1, *routing)[:seen], right.routed.reshape(-1, *routing)[:seen]
    rows = min(len(one), len(two))
    shared = (one[:rows, :, :, None] == two[:rows, :, None, :]).any(axis=3)
    return [float(share) for share in shared.mean(axis=(1, 2))]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
