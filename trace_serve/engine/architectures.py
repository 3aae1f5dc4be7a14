"""What a model's config.json says about whether an engine can serve it, before minutes are spent on a start (no torch).

A model that would load and then answer wrongly is worse than one that does not load, so each check names what SGLang
0.5.23 does with the model and what to change. An architecture that no check knows is tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError, RecipeError
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.recipe import Recipe

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LINEAR, _FULL = "linear_attention", "full_attention"


class Architecture:
    """One model as its config describes it.

    Attributes:
        name: the class that SGLang will load.
        text: the parsed config of the language model, which is a part of the whole in a multimodal one.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        names = config.get("architectures")
        self.name = str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "unknown"))
        part = config.get("text_config")
        self.text: Mapping[str, Any] = part if isinstance(part, Mapping) else config

    @classmethod
    def of(cls, model: Path) -> Architecture:
        """Reads `config.json` of a model directory.

        Raises:
            ConfigError: the file is not a JSON object.
        """
        return cls(read_json_object(model / "config.json"))

    @property
    def layers(self) -> int:
        return _count(self.text, "num_hidden_layers")

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return max(_count(self.text, name) for name in _EXPERT_COUNTS)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """`linear_attention` or `full_attention` for each layer, as SGLang builds them."""
        if not self._is_hybrid_family:
            return (_FULL,) * self.layers
        interval = _count(self.text, "full_attention_interval") or 4
        return tuple(_LINEAR if (layer + 1) % interval else _FULL for layer in range(self.layers))

    @property
    def _is_hybrid_family(self) -> bool:
        return "linear_num_value_heads" in self.text

    @property
    def is_hybrid(self) -> bool:
        """Some layers have linear attention, whose state is no KV cache."""
        return _LINEAR in self.layer_types

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that keep K and V."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind == _FULL)

    @property
    def model_package(self) -> str:
        """The package from which SGLang imports its model class first, see `engine.models`."""
        family = ".qwen3_5" if self.name.startswith("Qwen3_5") else ""
        return f"trace_serve.engine.models{family}"

    def check(self, recipe: Recipe, *, device: str, context_length: int | None = None, ranks: int = 1) -> None:
        """Refuses what would fail late or answer wrongly.

        Args:
            recipe: numeric choices of the engine.
            device: `cpu` or `cuda`.
            context_length: longest prompt plus answer; None is the model's own limit.
            ranks: tensor-parallel ranks that share the model.

        Raises:
            ConfigError: SGLang or the CPU engine cannot serve this architecture, or a card this recipe.
            RecipeError: the recipe quantizes what the model does not have.
        """
        if device != "cpu" and not recipe.is_bf16:
            raise ConfigError(
                f"device: got {device}, and the policy's recipe is FP4; in this version NVFP4 experts and KV run on "
                "the CPU engine; serve a policy of the bf16 recipe on cards, or this one with device=cpu",
                field="device",
            )
        if device == "cpu":
            self._check_attention()
        self._check_family(ranks)
        if device == "cuda":
            self._check_ranks(ranks)
        self._check_window(context_length)
        self._check_recipe(recipe)

    def arguments(self, *, device: str) -> tuple[str, ...]:
        """What SGLang's server must be told beside the usual, as on its command line."""
        if device != "cpu" or not self.is_hybrid:
            return ()
        # Snapshots of recurrent state during a forward pass exist on cards only. Without them the state is kept at the
        # end of a request, which needs the scheduler to wait for each pass.
        return ("--mamba-radix-cache-strategy=no_buffer", "--disable-overlap-schedule")

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError(f"model architecture {self.name}: {why}", field="model")

    def _check_attention(self) -> None:
        if _count(self.text, "kv_lora_rank"):
            raise self._refuse(
                "it has multi-head latent attention, which keeps one compressed vector a token in place of K and V; "
                "this engine's attention (torch_native) and its NVFP4 KV cache know K and V only; serve a model with "
                "multi-head or grouped-query attention"
            )
        if self.text.get("model_type") == "gpt_oss" or "GptOss" in self.name:
            raise self._refuse(
                "it has attention sinks, which this engine's attention backend (torch_native) does not compute, and "
                "experts with biases and a clamped activation, which the NVFP4 expert layer does not; serve a model "
                "without them"
            )

    def _check_family(self, ranks: int) -> None:
        clip = self.text.get("clip_qkv")
        if clip is not None and "Olmoe" in self.name:
            raise self._refuse(f"config clip_qkv is {clip!r} and SGLang does not clip; expected null")
        if ranks > 1 and "Olmoe" in self.name:
            raise self._refuse(
                f"it norms q and k over all heads together, and SGLang would norm each of {ranks} ranks' heads alone; "
                "start with tensor_parallel=1"
            )
        if not self._is_hybrid_family:
            return
        stated = self.text.get("layer_types")
        if isinstance(stated, list) and tuple(stated) != self.layer_types:
            raise self._refuse(
                f"config layer_types names {stated.count(_FULL)} full-attention layers, but SGLang builds layers by "
                f"full_attention_interval ({self.text.get('full_attention_interval')!r}, default 4), which gives "
                f"{len(self.kv_layers)}; add full_attention_interval to config.json so that both agree"
            )

    def _check_ranks(self, ranks: int) -> None:
        """SGLang pads heads on the CPU; on a card it asserts, once every process has loaded its libraries."""
        heads, kv_heads = (_count(self.text, f"num_{kind}_heads") for kind in ("attention", "key_value"))
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ConfigError(
                f"tensor_parallel: got {ranks}, expected a number of cards that divides the model's {heads} heads, and "
                f"divides its {kv_heads} KV heads or is a multiple of them",
                field="tensor_parallel",
            )

    def _check_window(self, context_length: int | None) -> None:
        window = _count(self.text, "sliding_window")
        switched_on = {"MixtralForCausalLM": True, "Qwen3MoeForCausalLM": self.text.get("use_sliding_window") is True}
        if not window or not switched_on.get(self.name, False):
            return
        length = context_length or _count(self.text, "max_position_embeddings")
        if length > window:
            raise self._refuse(
                f"config sliding_window is {window} and SGLang's class attends to every token: beyond {window} tokens "
                f"the answers are those of another model; start with context_length={window} or less"
            )

    def _check_recipe(self, recipe: Recipe) -> None:
        if recipe.experts != "bf16" and not self.experts:
            raise RecipeError(
                f"recipe experts: {recipe.experts!r} quantizes routed experts, and {self.name} has none; choose "
                "experts='bf16'",
                field="experts",
            )
        if recipe.kv != "bf16" and recipe.kv_layers is not None:
            without = [layer for layer in recipe.kv_layers if layer not in self.kv_layers]
            if without:
                raise RecipeError(
                    f"recipe kv_layers: layers {without} of {self.name} keep no K and V; it has them in "
                    f"{list(self.kv_layers)}",
                    field="kv_layers",
                )
        if recipe.experts != "bf16" and recipe.expert_layers is not None and recipe.expert_layers[-1] >= self.layers:
            raise RecipeError(
                f"recipe expert_layers: layer {recipe.expert_layers[-1]} does not exist, {self.name} has {self.layers}",
                field="expert_layers",
            )


def _count(config: Mapping[str, Any], name: str) -> int:
    """A number of things from a config; 0 where it is missing, null or no number."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
