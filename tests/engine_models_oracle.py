"""Comparison of an engine's tokens and log-probabilities with Hugging Face's forward pass of the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from trace_serve.engine.launch import EngineProcess


@dataclass(frozen=True)
class Answer:
    """One greedy answer of the engine.

    Attributes:
        prompt, output: token ids.
        prompt_logprobs: of every prompt token from `start + 1` on.
        start: first prompt position whose log-probabilities were asked for.
        output_logprobs: of every output token.
        cached: prompt tokens that came from the prefix cache.
        meta: the rest of what the engine said.
    """

    prompt: list[int]
    output: list[int]
    prompt_logprobs: list[float]
    start: int
    output_logprobs: list[float]
    cached: int
    meta: dict[str, Any]


def generate(
    engine: EngineProcess,
    prompt: list[int],
    *,
    new_tokens: int = 12,
    start: int | None = 0,
    hints: bool = False,
) -> Answer:
    """Greedy tokens with log-probabilities; `start` None asks for the output's alone, so that a prefix can hit."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if hints:
        sampling["custom_params"] = {"trace_hints": "inline"}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    if start is not None:
        body["logprob_start_len"] = start
    raw = engine.request("/generate", body, timeout_s=180)
    meta = raw["meta_info"]
    inputs = [entry[0] for entry in meta.get("input_token_logprobs") or () if entry[0] is not None]
    return Answer(
        prompt=prompt,
        output=list(raw["output_ids"]),
        prompt_logprobs=inputs,
        start=len(prompt) - 1 if start is None else start,
        output_logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        cached=int(meta["cached_tokens"]),
        meta=meta,
    )


class Oracle:
    """Hugging Face's model of a directory, in BF16 on the CPU."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """FP32 [len(tokens), vocabulary]: row i is the distribution of token i + 1."""
        logits = self.model(torch.tensor([tokens])).logits[0].float()
        return torch.log_softmax(logits, dim=-1)

    @torch.no_grad()
    def trace(self, tokens: list[int]) -> Trace:
        """Runs the model once and keeps what its layers saw."""
        seen = Trace({}, {}, {})
        handles = []
        for name, module in self.model.named_modules():
            layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
            if layer is None:
                continue
            if name.endswith(".gate"):
                handles.append(module.register_forward_pre_hook(partial(seen.router, layer)))
            elif name.endswith(".v_proj"):
                handles.append(module.register_forward_hook(partial(seen.value, layer)))
        self.model(torch.tensor([tokens]))
        for handle in handles:
            handle.remove()
        return seen


@dataclass(frozen=True)
class Trace:
    """By layer index, what one pass over T tokens computed.

    Attributes:
        experts_in: [T, H], input of the router and of the experts.
        routed: [T, k], the experts that it chooses, in no order.
        v: [T, kv_heads * D]; only layers with full attention have it.
    """

    experts_in: dict[int, torch.Tensor]
    routed: dict[int, torch.Tensor]
    v: dict[int, torch.Tensor]

    def router(self, layer: int, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        x = arguments[0].reshape(-1, arguments[0].shape[-1])
        self.experts_in[layer] = x
        self.routed[layer] = (x.float() @ module.weight.float().T).topk(2, dim=-1).indices

    def value(self, layer: int, module: Any, arguments: object, output: torch.Tensor) -> None:
        self.v[layer] = output.reshape(-1, output.shape[-1])


@dataclass(frozen=True)
class Agreement:
    """Distances in nats between an answer and the oracle's pass over the same tokens.

    Attributes:
        count: log-probabilities compared.
        mean, largest: absolute differences.
        greedy_gap: the most by which a token of the answer falls short of the oracle's best token.
        greedy_equal: share of output tokens that are the oracle's best.
    """

    count: int
    mean: float
    largest: float
    greedy_gap: float
    greedy_equal: float


def compare(oracle: Oracle, answer: Answer) -> Agreement:
    tokens = [*answer.prompt, *answer.output]
    table = oracle.logprobs(tokens)
    first = len(answer.prompt) - len(answer.prompt_logprobs)
    ours = torch.tensor([*answer.prompt_logprobs, *answer.output_logprobs])
    targets = torch.tensor(tokens[first:])
    rows = table[first - 1 : len(tokens) - 1]
    difference = (rows.gather(1, targets[:, None])[:, 0] - ours).abs()
    outputs = rows[len(answer.prompt_logprobs) :]
    chosen = outputs.gather(1, torch.tensor(answer.output)[:, None])[:, 0]
    return Agreement(
        count=len(ours),
        mean=float(difference.mean()),
        largest=float(difference.max()),
        greedy_gap=float((outputs.max(dim=-1).values - chosen).max()),
        greedy_equal=float((outputs.argmax(dim=-1) == torch.tensor(answer.output)).float().mean()),
    )
