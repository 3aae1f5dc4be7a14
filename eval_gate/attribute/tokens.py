"""Tokens of a recorded answer, with log-probabilities and routed experts where the server sent them."""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval_gate.arms.records import SampleRecord


@dataclass(frozen=True)
class AnswerTokens:
    """One answer as a sequence.

    Attributes:
        unit: what `tokens` are: `token ids`, `tokens` (their text), or `words` where a server tells neither.
        tokens: T of them.
        texts: the same T tokens as text; None where the server did not send them.
        logprobs: float64 [T]; None where they were not recorded for every token.
        top: most likely token of each position, as text; None where it was not recorded for every token.
        routed: int32 values of [rows, layers, top-k]: experts of each token that passed through the model, prompt
            first and without the last sampled token; None where they were not recorded.
        prompt: tokens of the prompt; None where the server did not say.
    """

    unit: str
    tokens: tuple[Any, ...]
    texts: tuple[str, ...] | None
    logprobs: NDArray[np.float64] | None
    top: tuple[str, ...] | None
    routed: NDArray[np.int32] | None
    prompt: int | None


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of an answer in few bytes, in place of its response where very many are held at once.

    Attributes:
        ids: int32 [T]; empty where no ids were recorded.
        texts: T texts; empty where none were recorded.
    """

    ids: NDArray[np.int32]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, response: Any) -> PackedTokens | None:
        """None where the response has no tokens."""
        body = response if isinstance(response, dict) else {}
        choice = _choice(body)
        ids = _ids(body, choice) or []
        # Equal tokens share one string.
        texts = tuple(map(sys.intern, _logprobs(choice.get("logprobs"))[0]))
        if not (ids or texts) or max(ids, default=0) >= 1 << 31 or min(ids, default=0) < 0:
            return None
        return cls(np.array(ids, dtype=np.int32), texts)


def answer_tokens(record: SampleRecord) -> AnswerTokens:
    """Reads an answer of our arms: a chat or completions body, or that of the transformers arm."""
    if isinstance(record.response, PackedTokens):
        return _unpacked(record.response, record.prompt_tokens)
    body = record.response if isinstance(record.response, dict) else {}
    choice = _choice(body)
    texts, logprobs, top = _logprobs(choice.get("logprobs"))
    ids = _ids(body, choice)
    unit = "token ids" if ids is not None else "tokens" if texts else "words"
    tokens: Sequence[Any] = ids or texts or (record.text or "").split()
    if logprobs is not None and len(logprobs) != len(tokens):
        logprobs = top = None
    extension = body.get("sglext")
    routed = extension.get("routed_experts") if isinstance(extension, dict) else None
    shown = tuple(texts) if texts and len(texts) == len(tokens) else None
    return AnswerTokens(unit, tuple(tokens), shown, logprobs, top, _routed(routed), record.prompt_tokens)


def _unpacked(packed: PackedTokens, prompt: int | None) -> AnswerTokens:
    ids = tuple(packed.ids.tolist())
    if not ids:
        return AnswerTokens("tokens", packed.texts, packed.texts, None, None, None, prompt)
    texts = packed.texts if len(packed.texts) == len(ids) else None
    return AnswerTokens("token ids", ids, texts, None, None, None, prompt)


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _ids(body: dict[str, Any], choice: dict[str, Any]) -> list[int] | None:
    found = next((one for one in (choice.get("response_token_ids"), choice.get("token_ids")) if one), None)
    found = body.get("token_ids") if found is None else found
    whole = isinstance(found, list) and bool(found) and all(type(one) is int for one in found)
    return found if whole else None


def _logprobs(raw: Any) -> tuple[list[str], NDArray[np.float64] | None, tuple[str, ...] | None]:
    """Texts, log-probabilities and most likely tokens, of the chat form or the completions form."""
    if not isinstance(raw, dict):
        return [], None, None
    if isinstance(raw.get("content"), list):
        entries = [entry for entry in raw["content"] if isinstance(entry, dict)]
        texts = [str(entry.get("token", "")) for entry in entries]
        values = [entry.get("logprob") for entry in entries]
        tops = [_first(entry.get("top_logprobs")) for entry in entries]
    else:
        texts = [str(text) for text in raw.get("tokens") or ()]
        values = list(raw.get("token_logprobs") or ())
        tops = [_likeliest(one) for one in raw.get("top_logprobs") or ()]
    complete = len(values) == len(texts) and all(isinstance(value, int | float) for value in values)
    known = bool(texts) and len(tops) == len(texts) and all(top is not None for top in tops)
    return (
        texts,
        np.array(values, dtype=np.float64) if texts and complete else None,
        tuple(str(top) for top in tops) if known else None,
    )


def _likeliest(entries: Any) -> str | None:
    if not isinstance(entries, dict) or not entries:
        return None
    return str(max(entries.items(), key=lambda one: one[1])[0])


def _first(entries: Any) -> str | None:
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        return None
    best = max(entries, key=lambda one: one.get("logprob", float("-inf")))
    return None if best.get("token") is None else str(best["token"])


def _routed(text: Any) -> NDArray[np.int32] | None:
    if not isinstance(text, str):
        return None
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4").astype(np.int32)
    except (binascii.Error, ValueError):
        return None
