"""Plug for a Hugging Face model, alone or under FSDP2: training that rounds and routes as the rollouts did.

    hinted = HintedModel(model, recipe)
    model.gradient_checkpointing_enable(hinted.checkpointing())
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, rollout_hints=files).loss

Parameters stay the trainer's own under their own names: their NVFP4 images are made anew in every pass, and gradients
pass through (straight-through), so any optimizer, `fully_shard` and `transformers.Trainer` work as they do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.guided.hf.experts import check_experts, experts_forward, layer_of
from trace_serve.guided.hf.rounding import Rounding, rotated
from trace_serve.guided.plugs.micro_batch import MicroBatches, on_cpu
from trace_serve.guided.rule import TAU_ALIGNED
from trace_serve.recipe import Recipe

_EXPERTS = "trace_serve_hinted"
_MARK = "trace_serve_hinted"


class HintedModel(MicroBatches):
    """Makes a transformers model round what the engine rounds, toward the outcomes of its rollouts, in place.

    Call it before `fully_shard`. The cost on top of the model's own: every expert that a pass uses is quantized in it.

    Args:
        model: Mixtral, Qwen3-MoE, OLMoE, Qwen3.5-MoE or alike: experts in one module a layer with `gate_up_proj`
            [E, 2I, H] and `down_proj` [E, H, I].
        recipe: that of the rollouts.
        tau: guard; see `trace_serve.guided.rule`.
        layers, sites: what is guided, as `HintedRounding`; the rest is rounded to nearest.
        replay_routes: R3.

    Raises:
        ConfigError: the model has parts that cannot be rounded, or none that the recipe names.
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
        experts = _experts_of(model, recipe) if recipe.experts != "bf16" else {}
        attention = _attention_of(model, recipe) if recipe.kv != "bf16" else {}
        if not experts and not attention:
            raise ConfigError(f"{type(model).__name__}: has nothing that the recipe quantizes", field="recipe")
        super().__init__(model, recipe, tau=tau, layers=layers, sites=sites, replay_routes=replay_routes)
        for layer, module in (*experts.items(), *attention.items()):
            setattr(module, _MARK, (layer, recipe, self))
        if experts:
            _compute_experts(model)
        if attention:
            _compute_attention(model)


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """The model's weights under the names of its checkpoint, in host memory, as `trace_serve.engine.push` sends them.

    transformers holds the experts of a layer fused; the checkpoint, and so the engine, has them one by one. Shards are
    gathered: call it on every rank and send from one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    gathered = {name: on_cpu(tensor) for name, tensor in model.state_dict().items()}
    named: dict[str, Tensor] = revert_weight_conversion(model, gathered)
    return {name: tensor.contiguous() for name, tensor in named.items()}


def _experts_of(model: Any, recipe: Recipe) -> dict[int, Any]:
    named = [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]
    chosen = {layer_of(name): (name, module) for name, module in named if recipe.quantizes_experts(layer_of(name))}
    if not chosen:
        raise ConfigError(f"{type(model).__name__}: has no experts that the recipe quantizes", field="recipe")
    for name, module in chosen.values():
        check_experts(name, module)
    return {layer: module for layer, (_, module) in chosen.items()}


def _attention_of(model: Any, recipe: Recipe) -> dict[int, Any]:
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")]
    chosen = {module.layer_idx: module for module in layers if recipe.quantizes_kv(module.layer_idx)}
    if not chosen:
        raise ConfigError(f"{type(model).__name__}: has no KV cache that the recipe quantizes", field="recipe")
    return chosen


def _compute_experts(model: Any) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
    model.set_experts_implementation(_EXPERTS)


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], chosen [T, K] expert indices, weights [T, K] to [T, H]."""
    mark = getattr(module, _MARK, None)
    computed: Tensor = experts_forward(module if mark is None else _Images(module, *mark), hidden, chosen, weights)
    return computed


class _Images:
    """Experts as `experts_forward` reads them, whose matrices are quantized when they are asked for."""

    def __init__(self, module: Any, layer: int, recipe: Recipe, rounding: Rounding) -> None:
        self.gate_up_proj = _Matrices(module.gate_up_proj, recipe, 2)
        self.down_proj = _Matrices(module.down_proj, recipe, 1)
        self.trace_serve = (layer, recipe.expert_rotation, rounding if recipe.experts == "w4a4" else None)


class _Matrices:
    def __init__(self, weights: Tensor, recipe: Recipe, parts: int) -> None:
        self._weights, self._recipe, self._parts = weights, recipe, parts
        self.shape = weights.shape

    def __getitem__(self, expert: int) -> Tensor:
        source = rotated(self._weights[expert], self._recipe.expert_rotation)
        return nvfp4.fake_quantize_weight(source, self._recipe, parts=self._parts).to(self._weights.dtype)


def _compute_attention(model: Any) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = model.config.get_text_config()._attn_implementation
    base = own if own in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"
    name = f"trace_serve_hinted_{base}"

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """query [B, heads, T, D], key and value [B, KV heads, S, D]."""
        mark = getattr(module, _MARK, None)
        if mark is not None:
            layer, recipe, rounding = mark
            width = recipe.k_rotation
            query = rotated(query, width).to(query.dtype)
            key = rounding.keys(layer, rotated(key, width), 0).to(key.dtype)
            value = rounding.values(layer, value, 0).to(value.dtype)
        found: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS[base](module, query, key, value, mask, **options)
        return found

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ConfigError(
            f"{type(model).__name__}: its attention cannot be exchanged; use a recipe with kv bf16", field="recipe"
        )
