"""Samples from the real FP4 engine, with everything that a trainer is told about them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import EngineError
from trace_serve.hints import sinks, wire
from trace_serve.hints.options import HintOptions
from trace_serve.hints.rows import HintFile
from trace_serve.mismatch.metrics import Top
from trace_serve.recipe import Recipe

START_TIMEOUT_S = 900.0
HINTS_TIMEOUT_S = 300.0
SPARE_TOKENS = 1024
"""KV slots beyond those of the rollouts, for the engine's own warm-up and page ends."""


@dataclass(frozen=True)
class Rollout:
    """One sampled trajectory.

    Attributes:
        hints: its hint file, with whole codes and scale bytes, log-probabilities and routed experts.
        top: the most probable tokens at each of the S sampled positions.
        temperature: that its log-probabilities belong to; 1 for greedy sampling.
    """

    hints: HintFile
    top: Top
    temperature: float = 1.0

    @property
    def tokens(self) -> NDArray[np.int64]:
        """int64 [T + 1], the inputs of its rows and the last sampled token."""
        return np.append(self.hints.token_ids.astype(np.int64), np.int64(self.hints.next_token_id or 0))

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """Rows [T] whose next token was sampled."""
        assert self.hints.logprobs is not None
        return ~np.isnan(self.hints.logprobs)

    @property
    def next_tokens(self) -> NDArray[np.int64]:
        """int64 [S], the sampled tokens."""
        return self.tokens[1:][self.sampled]

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """float64 [S], of the sampled tokens."""
        assert self.hints.logprobs is not None
        return self.hints.logprobs.astype(np.float64)[self.sampled]


@dataclass(frozen=True)
class Sampling:
    """How rollouts are sampled.

    Attributes:
        tokens: sampled tokens of each.
        temperature: 0 is greedy.
        top: most probable tokens that are kept of each position.
    """

    tokens: int
    temperature: float
    top: int


def roll_out(
    model: Path,
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    sites: Sequence[str],
    log_path: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Rollout]:
    """Starts an engine, samples one continuation a prompt, and stops it.

    Args:
        model: directory with the model.
        recipe: numeric choices of the rollout.
        prompts: token ids.
        sampling: how.
        sites: hint sites that the engine keeps.
        log_path: file for the engine's output.
        progress: told what goes on.

    Raises:
        EngineError: the engine does not start, or a rollout has no usable hints.
    """
    options = HintOptions(sites=tuple(sites), codes="full", scale="byte")
    slots = sum(map(len, prompts)) + len(prompts) * sampling.tokens + SPARE_TOKENS
    with tempfile.TemporaryDirectory(prefix="trace-mismatch-") as hint_dir:
        config = EngineConfig(
            model=model,
            recipe=recipe,
            hints=options,
            # Whole codes of a long rollout are more than an answer may carry.
            hint_dir=Path(hint_dir),
            log_path=log_path,
            max_total_tokens=slots,
        )
        engine = EngineProcess(config)
        progress("starting the FP4 engine")
        engine.start()
        try:
            engine.wait_ready(START_TIMEOUT_S)
            progress(f"sampling {len(prompts)} rollouts of {sampling.tokens} tokens")
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(lambda ids: _sample(engine, ids, sampling), prompts))
        finally:
            engine.stop()


def _sample(engine: EngineProcess, prompt: Sequence[int], sampling: Sampling) -> Rollout:
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "return_logprob": True,
        "top_logprobs_num": sampling.top,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.tokens,
            "ignore_eos": True,
            "custom_params": {"trace_hints": {"sink": "file"}},
        },
    }
    meta = engine.request("/generate", body, timeout_s=3600)["meta_info"]
    found = meta["trace_hints"]
    if found.get("status") != "queued":
        raise EngineError(f"the engine gave no hints: {found}")
    hints = wire.from_bytes(sinks.fetch(found["uri"], timeout_s=HINTS_TIMEOUT_S))
    wire.require_nonzero(hints)
    top = _top(meta.get("output_top_logprobs") or [], sampling)
    rollout = Rollout(hints, top, sampling.temperature or 1.0)
    if hints.logprobs is None or len(rollout.logprobs) != len(top.ids):
        raise EngineError("the engine's hints and answer have other numbers of log-probabilities, expected the same")
    return rollout


def _top(positions: Sequence[Sequence[Sequence[Any]]], sampling: Sampling) -> Top:
    """Reads SGLang's [log-probability or null, token id, text] triples; null stands for a probability of 0."""
    if len(positions) != sampling.tokens or any(len(each) != sampling.top for each in positions):
        raise EngineError(f"the engine gave no {sampling.top} log-probabilities a position; choose a smaller --top")
    logprobs = [[-np.inf if entry[0] is None else entry[0] for entry in each] for each in positions]
    ids = [[entry[1] for entry in each] for each in positions]
    return Top(np.array(ids, dtype=np.int64), np.array(logprobs, dtype=np.float64))
