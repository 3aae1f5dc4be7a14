"""The model as a trainer computes it: Hugging Face transformers in this process, one request at a time.

BF16, or fake-quantized under a recipe (`fake_quantized`). torch is imported when the arm opens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eval_gate.arms.base import Exchange, unanswered
from eval_gate.arms.evidence import ArmEvidence, EngineReport, LayerReport
from eval_gate.arms.records import ErrorClass, Failure
from trace_serve.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from trace_serve.guided.hf.rounding import Rounding
    from trace_serve.recipe import Recipe

_PACKAGES = "needs torch and transformers; install trace-serve[gate-hf]"


class TransformersArm:
    """A model in this process; an async context manager.

    Args:
        directory: Hugging Face model directory.
        recipe: experts and KV cache are fake-quantized under it; None computes in BF16.
        evidence: of the directory.
        rounding: rounds activations, K and V; None is the recipe's own nearest rounding.
    """

    def __init__(
        self, directory: Path, recipe: Recipe | None, evidence: ArmEvidence, rounding: Rounding | None = None
    ) -> None:
        self._directory = directory
        self._recipe = recipe
        self._evidence = evidence
        self._rounding = rounding
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eval-gate-transformers")
        self._stop = threading.Event()
        self._model: Any = None
        self._tokenizer: Any = None
        self._experts = self._kv = 0
        self.model = directory.name
        self.root: str | None = str(directory)

    async def __aenter__(self) -> Self:
        try:
            await self._run(self._load)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)
        self._model = None

    async def report(self) -> EngineReport | None:
        """What this process computes, in the form of an engine's report."""
        from trace_serve.policy.tokenizer import chat_template_digest, tokenizer_digest

        config = self._model.config.get_text_config()
        total = int(config.num_hidden_layers)
        return EngineReport(
            schema_version=1,
            mode="bf16" if self._recipe is None else "fake_quantized",
            recipe_id=self._recipe.recipe_id if self._recipe else None,
            recipe=self._recipe.to_dict() if self._recipe else None,
            policy_digest=self._evidence.artifact_digest,
            tokenizer_digest=tokenizer_digest(self._directory),
            chat_template_digest=chat_template_digest(self._directory),
            experts=LayerReport(format=_format(self._experts), layers_quantized=self._experts, layers_total=total),
            kv=LayerReport(format=_format(self._kv), layers_quantized=self._kv, layers_total=total),
            context_length=getattr(config, "max_position_embeddings", None),
            vocab_size=config.vocab_size,
        )

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Token ids of the rendered prompt."""
        ids: list[int] = await self._run(self._ids, body)
        return ids

    async def complete(self, body: dict[str, Any]) -> Exchange:
        """Generates greedily at temperature 0, else samples. A model that fails is a failed exchange."""
        started = time.monotonic()
        try:
            exchange: Exchange = await self._run(self._generate, body)
        except Exception as exc:
            failure = Failure(kind=ErrorClass.SERVER, message=f"{type(exc).__name__}: {exc}"[:300])
            return unanswered(failure, attempts=1)
        return replace(exchange, latency_s=time.monotonic() - started)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _load(self) -> None:
        try:
            import torch
            import transformers
        except ImportError as exc:
            raise ConfigError(f"hf:{self._directory}: {_PACKAGES}", field="training") from exc
        # Its bars would be drawn over the gate's own.
        transformers.utils.logging.disable_progress_bar()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._directory)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            model = transformers.AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.bfloat16)
            self._model = model.to(device).eval()
        except (OSError, ValueError, RuntimeError) as exc:
            raise EngineError(f"hf:{self._directory}: cannot be loaded: {' '.join(str(exc).split())[:300]}") from exc
        if self._recipe is not None:
            from trace_serve.guided.hf.fake_quantized import fake_quantize

            layers = fake_quantize(self._model, self._recipe, self._rounding)
            self._experts, self._kv = layers.experts, layers.kv

    def _ids(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return [int(token) for token in self._tokenizer(body["prompt"])["input_ids"]]
        encoded = self._tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return [int(token) for token in encoded["input_ids"]]

    def _generate(self, body: dict[str, Any]) -> Exchange:
        import torch

        prompt = self._ids(body)
        stop = self._stop

        def cancelled(ids: Any, scores: Any, **named: Any) -> Any:
            return torch.full((ids.shape[0],), stop.is_set(), dtype=torch.bool, device=ids.device)

        sampled = body["temperature"] > 0
        settings: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": body["max_tokens"]}
        settings |= {
            "temperature": body["temperature"] if sampled else None,
            "top_p": body["top_p"] if sampled else None,
        }
        if not sampled:
            settings["top_k"] = None
        inputs = torch.tensor([prompt], device=self._model.device)
        with torch.inference_mode():
            found = self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), stopping_criteria=[cancelled], **settings
            )
        answer = found[0, len(prompt) :].tolist()
        ended = bool(answer) and answer[-1] in self._stop_ids()
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return Exchange(
            response={"token_ids": answer},
            text=text,
            finish_reason="stop" if ended else "length",
            prompt_tokens=len(prompt),
            completion_tokens=len(answer),
            latency_s=None,
            attempts=1,
            failure=None,
        )

    def _stop_ids(self) -> set[int]:
        ids = self._model.generation_config.eos_token_id
        return set(ids) if isinstance(ids, list) else {ids}


def _format(layers: int) -> str:
    return "nvfp4 (fake-quantized)" if layers else "bf16"
