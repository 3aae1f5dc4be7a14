"""How much of the distance between served answers and their training-time version is rounding.

The engine answers queries again and keeps hints of its rounding; transformers then scores the tokens of each answer as
a trainer computes them: in BF16, under the recipe, and under the recipe following the hints. The tokens are the served
ones throughout, so that the figures differ by arithmetic alone.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from eval_gate.arms.source import ArmSource
from eval_gate.execute import request_body
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query
from trace_serve.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from trace_serve.hints.rows import HintFile
    from trace_serve.recipe import Recipe


class RoundingShare(BaseModel):
    """Mean |log p - log q| in nats over the served tokens, p of the engine, q of a training-time version.

    Attributes:
        answers, tokens: that were scored.
        bf16: nothing is quantized.
        nearest: experts and K/V are fake-quantized under the recipe and rounded to nearest.
        routes: the same, and tokens go to the experts that the engine chose.
        hints: the same, and values are rounded to the engine's side.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    answers: int
    tokens: int
    bf16: float
    nearest: float
    routes: float
    hints: float

    @property
    def sentence(self) -> str:
        """The finding in words."""
        share = f", {100 * (1 - self.hints / self.nearest):.0f}% less" if self.nearest > 0 else ""
        return (
            f"rounding, over {self.tokens} served tokens of {self.answers} answers: the training-time version is "
            f"{self.nearest:.4f} nats a token from the engine by nearest rounding, {self.routes:.4f} with its routes, "
            f"{self.hints:.4f} with its routes and rounding{share}; BF16 is {self.bf16:.4f}"
        )


async def rounding_share(
    source: ArmSource, recipe: Recipe, queries: Sequence[Query], policy: GatePolicy, startup_timeout_s: float, log: Path
) -> RoundingShare:
    """Asks an engine under the recipe for answers with hints, and scores them in transformers after it has stopped.

    Args:
        source: a directory with BF16 weights.
        log: file for the engine's output.

    Raises:
        EngineError: the engine failed, or gave an answer without hints.
        ConfigError: torch or transformers is missing, or cannot compute the model under the recipe.
    """
    files: list[HintFile] = []
    async with replace(source, recipe=recipe).open(startup_timeout_s, log) as arm:
        for query in queries:
            body = request_body(query, policy) | {"model": arm.model, "custom_params": {"trace_hints": "inline"}}
            exchange = await arm.complete(body)
            if exchange.failure is not None:
                raise EngineError(f"query {query.id!r}, asked for hints: {exchange.failure.message}")
            files.append(decoded(query.id, exchange.response))
    directory = source.directory
    assert directory is not None
    return await asyncio.to_thread(score, directory, recipe, files, policy.temperature)


def score(directory: Path, recipe: Recipe, files: Sequence[HintFile], temperature: float) -> RoundingShare:
    """Scores rollouts by their training-time versions.

    Args:
        directory: Hugging Face model with the BF16 weights that were served.
        files: hints with log-probabilities and routed experts.
        temperature: of sampling; 0 is greedy, whose log-probabilities are those of 1.

    Raises:
        ConfigError: torch or transformers is missing, or cannot compute the model under the recipe.
    """
    try:
        import torch
        import transformers
    except ImportError as exc:
        raise ConfigError(
            "--rounding: needs torch and transformers; install trace-serve[gate-hf]", field="rounding"
        ) from exc
    from trace_serve.guided.plugs.hf import HintedModel

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def distances(hints: HintFile, **named: Any) -> list[float]:
        assert hints.logprobs is not None
        served = torch.from_numpy(hints.logprobs.astype("float64"))
        ids = torch.from_numpy(hints.token_ids.astype("int64"))
        following = torch.cat([ids[1:], torch.tensor([hints.next_token_id or 0])])
        with torch.inference_mode():
            logits = model(ids.unsqueeze(0), use_cache=False, **named).logits[0].float() / (temperature or 1.0)
            own = logits.log_softmax(dim=-1).gather(1, following.unsqueeze(-1)).squeeze(-1).double()
        found: list[float] = (own - served).abs()[~served.isnan()].tolist()
        return found

    bf16 = [one for hints in files for one in distances(hints)]
    HintedModel(model, recipe)
    nearest = [one for hints in files for one in distances(hints)]
    # A file without sites guides no rounding, and its routes are followed.
    routes = [one for hints in files for one in distances(hints, rollout_hints=[replace(hints, sites=())])]
    guided = [one for hints in files for one in distances(hints, rollout_hints=[hints])]
    if not bf16:
        raise EngineError("the engine's hints have no log-probabilities, so there is nothing to score")
    return RoundingShare(
        answers=len(files),
        tokens=len(bf16),
        bf16=sum(bf16) / len(bf16),
        nearest=sum(nearest) / len(nearest),
        routes=sum(routes) / len(routes),
        hints=sum(guided) / len(guided),
    )


def decoded(query_id: str, response: Any) -> HintFile:
    """The hint file inside an answer of an OpenAI route.

    Raises:
        EngineError: there is none that can be scored; the message has the engine's reason.
    """
    from trace_serve.hints import wire

    metadata = response.get("metadata") if isinstance(response, dict) else None
    found = metadata.get("trace_hints") if isinstance(metadata, dict) else None
    entry = found[0] if isinstance(found, list) and found else found
    if not isinstance(entry, dict) or entry.get("status") != "ok":
        reason = entry.get("reason", entry.get("status")) if isinstance(entry, dict) else "none came"
        raise EngineError(f"query {query_id!r}: no hints with the answer: {reason}")
    hints = wire.from_bytes(base64.b64decode(entry["data"]))
    if hints.logprobs is None:
        raise EngineError(f"query {query_id!r}: its hints have no log-probabilities")
    return hints
