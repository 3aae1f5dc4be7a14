"""Plug for ModelOpt: a quantization backend that rounds by the hints of a rollout.

    hinted = HintedQuantizers(model, recipe)          # instead of mtq.quantize
    loss = model(input_ids=ids, labels=labels, rollout_hints=files).loss

ModelOpt puts its quantizers where the recipe rounds (experts' inputs and weights, K and V) and calls the backend for
each. The products stay ModelOpt's: experts are summed in BF16 in the order of transformers, which differs from the
engine by roundings that the hints repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.guided.hf.experts import layer_of
from trace_serve.guided.hf.rounding import rotated
from trace_serve.guided.plugs.micro_batch import MicroBatches
from trace_serve.guided.rule import TAU_ALIGNED
from trace_serve.recipe import BLOCK, Recipe

BACKEND = "trace_serve"
_MARK = "trace_serve_rounds"

_NVFP4 = {
    "num_bits": (2, 1),
    "block_sizes": {-1: BLOCK, "type": "dynamic", "scale_bits": (4, 3)},
    "backend": BACKEND,
}
"""What ModelOpt records of a quantizer; the backend alone decides the values."""

_EXPERTS = ("gate_up_proj_weight_quantizers", "down_proj_weight_quantizers")
_EXPERT_INPUTS = ("gate_up_proj_input_quantizer", "down_proj_input_quantizer")
_ATTENTION = ("q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")


def register() -> None:
    """Makes the backend known to ModelOpt; once is enough, again does nothing."""
    quantizer = import_module("modelopt.torch.quantization.nn.modules.tensor_quantizer")
    if not quantizer.is_registered_quant_backend(BACKEND):
        quantizer.register_quant_backend(BACKEND, _round)


def _round(inputs: Tensor, quantizer: Any) -> Tensor:
    """The backend's entry point: `inputs` of one call of a quantizer, to the values that are kept."""
    rounds: Callable[[Tensor], Tensor] | None = getattr(quantizer, _MARK, None)
    if rounds is None:
        raise ConfigError(
            f"quant_cfg: a quantizer with backend {BACKEND!r} is none of the recipe's; let HintedQuantizers set it up",
            field="backend",
        )
    return rounds(inputs).to(inputs.dtype)


class HintedQuantizers(MicroBatches):
    """Quantizes a transformers model with ModelOpt, in place, so that it rounds toward its rollouts.

    Args:
        model: with experts that ModelOpt takes as fused (Mixtral, Qwen3-MoE, OLMoE, Qwen3.5-MoE); what is called.
        recipe: that of the rollouts.
        tau, layers, sites, replay_routes: as `MicroBatches`.

    Raises:
        ConfigError: ModelOpt found nothing that the recipe quantizes.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        *,
        tau: float = TAU_ALIGNED,
        layers: Sequence[int] | None = None,
        sites: Sequence[str] | None = None,
        replay_routes: bool = True,
    ) -> None:
        register()
        names = [*_EXPERTS, *_EXPERT_INPUTS, *_ATTENTION]
        chosen = [{"quantizer_name": f"*{name}*", "cfg": dict(_NVFP4), "enable": True} for name in names]
        config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *chosen], "algorithm": None}
        import_module("modelopt.torch.quantization").quantize(model, config)
        super().__init__(model, recipe, tau=tau, layers=layers, sites=sites, replay_routes=replay_routes)
        experts = [
            self._experts(name, module) for name, module in model.named_modules() if hasattr(module, _EXPERTS[0])
        ]
        kv = [self._attention(module) for module in model.modules() if hasattr(module, _ATTENTION[1])]
        if (recipe.experts != "bf16" and not any(experts)) or (recipe.kv != "bf16" and not any(kv)):
            raise ConfigError(
                f"{type(model).__name__}: ModelOpt quantizes no experts, or no K and V, that the recipe names",
                field="recipe",
            )

    def checkpointing(self) -> dict[str, Any]:
        # ModelOpt exchanges torch's linear() while experts compute; a recomputation that stops early would leave it so.
        return {**super().checkpointing(), "early_stop": False}

    def _experts(self, name: str, module: Any) -> bool:
        recipe, layer = self._recipe, layer_of(name)
        chosen = recipe.experts != "bf16" and recipe.quantizes_experts(layer)
        calls = _ExpertCalls(self, module, layer, recipe.expert_rotation)
        for quantizers, parts in zip(_EXPERTS, (2, 1), strict=True):
            for quantizer in getattr(module, quantizers):
                _set(quantizer, _weight(recipe, parts) if chosen else None)
        quantizes = chosen and recipe.experts == "w4a4"
        for quantizer, rounds in zip(_EXPERT_INPUTS, (calls.first, calls.second), strict=True):
            # Weights alone may be quantized, but a rotation of theirs needs that of the inputs.
            rotates = chosen and recipe.expert_rotation
            _set(getattr(module, quantizer), rounds if quantizes else _rotation(rotates) if rotates else None)
        if quantizes:
            module.register_forward_pre_hook(calls.begin)
            module.register_forward_hook(calls.end, always_call=True)
        return chosen

    def _attention(self, module: Any) -> bool:
        recipe, layer = self._recipe, module.layer_idx
        chosen = recipe.kv != "bf16" and recipe.quantizes_kv(layer)
        width = recipe.k_rotation

        def keys(x: Tensor) -> Tensor:
            return self.keys(layer, rotated(x, width), 0)

        def values(x: Tensor) -> Tensor:
            return self.values(layer, x, 0)

        for name, rounds in zip(_ATTENTION, (_rotation(width) if width else None, keys, values), strict=True):
            _set(getattr(module, name), rounds if chosen else None)
        return chosen


class _ExpertCalls:
    """The calls of one layer's input quantizers, which ModelOpt makes expert by expert.

    A quantizer sees an expert's rows without their numbers. They are those of the router's choice, in the order of
    transformers: by place among a row's experts, then by row.
    """

    def __init__(self, batches: MicroBatches, module: Any, layer: int, width: int) -> None:
        self._batches, self._module, self._layer, self._width = batches, module, layer, width
        self._hidden: Tensor | None = None
        self._chosen: Tensor | None = None
        self._rounded: Tensor | None = None

    def begin(self, module: Any, arguments: tuple[Any, ...]) -> None:
        self._hidden, self._chosen, self._rounded = arguments[0], arguments[1], None

    def end(self, module: Any, arguments: Any, output: Any) -> None:
        self._hidden = self._chosen = self._rounded = None

    def first(self, x: Tensor) -> Tensor:
        """Inputs of the first product [N, H]; a token is rounded once for all of its experts."""
        rows, _ = self._places(x)
        if self._rounded is None:
            assert self._hidden is not None
            self._rounded = self._batches.experts_in(self._layer, rotated(self._hidden, self._width)).to(x.dtype)
        return self._rounded[rows]

    def second(self, x: Tensor) -> Tensor:
        """Inputs of the second product [N, I]."""
        rows, places = self._places(x)
        return self._batches.experts_mid(self._layer, rotated(x, self._width), rows, places)

    def _places(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._chosen is None:
            raise ConfigError("modelopt: an expert was computed outside of its layer", field="modelopt")
        places, rows = torch.where(self._module._current_expert_idx == self._chosen.T)
        if rows.shape[0] != x.shape[0]:
            raise ConfigError(
                f"modelopt: an expert got {x.shape[0]} rows, the router chose {rows.shape[0]}; use the "
                "eager experts of transformers",
                field="modelopt",
            )
        return rows, places


def _weight(recipe: Recipe, parts: int) -> Callable[[Tensor], Tensor]:
    def image(weight: Tensor) -> Tensor:
        return nvfp4.fake_quantize_weight(rotated(weight, recipe.expert_rotation), recipe, parts=parts)

    return image


def _rotation(width: int) -> Callable[[Tensor], Tensor]:
    return lambda x: rotated(x, width)


def _set(quantizer: Any, rounds: Callable[[Tensor], Tensor] | None) -> None:
    if rounds is None:
        quantizer.disable()
    else:
        setattr(quantizer, _MARK, rounds)
