"""Samples from the real FP4 engine, with everything that a trainer is told about them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import EngineError
from trace_serve.hints import wire
from trace_serve.hints.options import HintOptions
from trace_serve.hints.rows import HintFile
from trace_serve.recipe import Recipe

START_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Rollout:
    """One sampled trajectory.

    Attributes:
        hints: its hint file, with log-probabilities and routed experts.
        tokens: int64 [T + 1], the inputs of its rows and the last sampled token.
    """

    hints: HintFile

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.append(self.hints.token_ids.astype(np.int64), np.int64(self.hints.next_token_id or 0))

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """Rows [T] whose next token was sampled."""
        assert self.hints.logprobs is not None
        return ~np.isnan(self.hints.logprobs)


def roll_out(
    model: Path,
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float,
    sites: Sequence[str],
    log_path: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Rollout]:
    """Starts an engine, samples one continuation a prompt, and stops it.

    Args:
        model: directory with the model.
        recipe: numeric choices of the rollout.
        prompts: token ids.
        tokens: sampled tokens of each.
        temperature: 0 is greedy.
        sites: hint sites that the engine keeps.
        log_path: file for the engine's output.
        progress: told what goes on.

    Raises:
        EngineError: the engine does not start, or a rollout has no usable hints.
    """
    options = HintOptions(sites=tuple(sites), scale="byte")
    engine = EngineProcess(EngineConfig(model=model, recipe=recipe, hints=options, log_path=log_path))
    progress("starting the FP4 engine")
    engine.start()
    try:
        engine.wait_ready(START_TIMEOUT_S)
        progress(f"sampling {len(prompts)} rollouts of {tokens} tokens")
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda ids: _sample(engine, ids, tokens, temperature), prompts))
    finally:
        engine.stop()


def _sample(engine: EngineProcess, prompt: Sequence[int], tokens: int, temperature: float) -> Rollout:
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "return_logprob": True,
        "sampling_params": {
            "temperature": temperature,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "custom_params": {"trace_hints": {"sink": "inline", "scale": "byte"}},
        },
    }
    answer = engine.request("/generate", body, timeout_s=3600)
    found = answer["meta_info"]["trace_hints"]
    if found.get("status") != "ok":
        raise EngineError(f"the engine gave no hints: {found}")
    hints = wire.from_bytes(base64.b64decode(found["data"]))
    wire.require_nonzero(hints)
    if hints.logprobs is None:
        raise EngineError("the engine gave hints without log-probabilities")
    return Rollout(hints)
