"""Plug for verl's FSDP engine: its QAT seam, for rounding and routing as the rollouts did.

    Engine = hinted_engine(Recipe())
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda")(Engine)

verl's own QAT (`engine_config.qat`) stays off: it replaces linear layers, not fused experts, and would pack the weights
that are sent to the rollout; the engine of trace-serve takes them in BF16 and quantizes them itself.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError
from trace_serve.guided.plugs.alignment import segments
from trace_serve.guided.plugs.hf import HintedModel
from trace_serve.guided.plugs.micro_batch import KEYWORD
from trace_serve.hints import wire
from trace_serve.hints.rows import HintFile
from trace_serve.recipe import Recipe

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_TENSORS = "verl.utils.tensordict_utils"


class Hinted:
    """What is added to `FSDPEngineWithLMHead`.

    A batch has one more key, `rollout_hints`: a path of a hint file a sample, None for those without.
    """

    trace_recipe: Recipe
    trace_options: dict[str, Any]
    engine_config: Any
    use_ulysses_sp: bool

    def _build_fsdp_module(self, module: Any) -> Any:
        """The module before it is sharded; engines that only score (reference policy) stay as they are."""
        parent: Any = super()
        if not self.engine_config.forward_only:
            if getattr(getattr(self.engine_config, "qat", None), "enable", False):
                raise ConfigError("engine_config.qat.enable: got true; the plug quantizes instead of it", field="qat")
            hinted = HintedModel(module, self.trace_recipe, **self.trace_options)
            if getattr(module, "is_gradient_checkpointing", False):
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=hinted.checkpointing())
        return parent._build_fsdp_module(module)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's arguments with the hints of the micro-batch, packed or padded as verl did its tokens."""
        parent: Any = super()
        inputs, others = parent.prepare_model_inputs(micro_batch=micro_batch)
        if self.engine_config.forward_only:
            return inputs, others
        if self.use_ulysses_sp:
            raise ConfigError(
                "ulysses_sequence_parallel_size: a rank has a part of each sequence, which hints cannot follow; use 1",
                field="ulysses_sequence_parallel_size",
            )
        paths = import_module(_TENSORS).get(micro_batch, KEYWORD)
        if paths is None:
            raise ConfigError(f"{KEYWORD}: not in the batch; have the agent loop return a path a sample", field=KEYWORD)
        hints: list[HintFile | None] = [None if each is None else wire.read(Path(each)) for each in paths]
        found = segments(inputs["input_ids"], inputs["attention_mask"], inputs["position_ids"])
        # Static padding of a packed row looks like further sequences behind the last.
        inputs[KEYWORD] = hints + [None] * (len(found) - len(hints))
        return inputs, others


def hinted_engine(recipe: Recipe, **options: Any) -> Any:
    """verl's FSDP engine for language models, following rollouts.

    Args:
        recipe: that of the rollouts.
        options: `tau`, `layers`, `sites`, `replay_routes`, as `HintedModel`.
    """
    base = import_module(_ENGINE).FSDPEngineWithLMHead
    return type("HintedFSDPEngine", (Hinted, base), {"trace_recipe": recipe, "trace_options": options})
