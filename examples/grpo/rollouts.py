"""Samples from the running FP4 engine, and new weights for it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.engine.launch import EngineProcess
from trace_serve.engine.push import Push
from trace_serve.errors import EngineError
from trace_serve.hints import wire
from trace_serve.hints.options import HintOptions
from trace_serve.hints.rows import HintFile

CONCURRENCY = 32
HINTS = HintOptions(sites=("experts_in", "k", "v"), scale="byte")
"""Whole scale bytes: with hints of three sites, their lowest bits alone leave a distance four times as large."""


@dataclass(frozen=True)
class Sample:
    """One sampled answer.

    Attributes:
        text: the answer.
        ended: whether it ended before the limit of tokens.
        hints: its hint file: tokens, lowest bits, scales, log-probabilities, routed experts.
        sampled_by: updates that the weights of its oldest sampled token had seen.
    """

    text: str
    ended: bool
    hints: HintFile
    sampled_by: int

    @property
    def places(self) -> NDArray[np.int64]:
        """Rows whose next token was sampled."""
        assert self.hints.logprobs is not None
        return np.flatnonzero(~np.isnan(self.hints.logprobs))

    @property
    def next_tokens(self) -> NDArray[np.int64]:
        """The token behind each row [T]."""
        return np.append(self.hints.token_ids[1:].astype(np.int64), np.int64(self.hints.next_token_id or 0))


class Sampler:
    """Asks one engine, and tells it which weights to serve.

    Args:
        engine: running, with hints.
        tokenizer: of transformers, with the chat template of the policy.
        tokens: limit of an answer.
    """

    def __init__(self, engine: EngineProcess, tokenizer: Any, tokens: int) -> None:
        self._engine, self._tokenizer, self._tokens = engine, tokenizer, tokens

    def refit(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Makes the engine serve these weights; its answers then say that `updates` updates made them.

        Raises:
            EngineError: the engine refused them.
        """
        with Push(self._engine.url, self._engine.api_key) as push:
            push.state_dict(tensors, version=f"step-{updates}")

    def sample(self, prompts: Sequence[str], *, temperature: float = 1.0) -> list[Sample]:
        """One answer a prompt, all prompts at once.

        Raises:
            EngineError: an answer without usable hints.
        """
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda prompt: self._one(prompt, temperature), prompts))

    def _one(self, prompt: str, temperature: float) -> Sample:
        encoded = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        body = {
            "input_ids": [int(token) for token in encoded["input_ids"]],
            "return_logprob": True,
            "sampling_params": {
                "temperature": temperature,
                "max_new_tokens": self._tokens,
                "custom_params": {"trace_hints": {"sink": "inline", "scale": HINTS.scale}},
            },
        }
        answer = self._engine.request("/generate", body, timeout_s=600)
        found, meta = answer["meta_info"]["trace_hints"], answer["meta_info"]
        if found.get("status") != "ok":
            raise EngineError(f"the engine gave no hints: {found}")
        hints = wire.from_bytes(base64.b64decode(found["data"]), expect_recipe_id=self._engine.recipe.recipe_id)
        wire.require_nonzero(hints)
        versions = [version for _, _, version in meta["weight_version_spans"]["sampled"]]
        return Sample(
            text=answer["text"],
            ended=meta["finish_reason"]["type"] == "stop",
            hints=hints,
            sampled_by=min(int(version.removeprefix("step-")) for version in versions),
        )
