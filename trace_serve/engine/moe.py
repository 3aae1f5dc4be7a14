"""Routed experts in NVFP4: the quantization config and the MoE method that SGLang loads.

Weights load as BF16 and are replaced by their NVFP4 image; a packed checkpoint is read as that image. With power-of-two
global scales BF16 holds it exactly, so a BF16 product of the images is the product of the NVFP4 values; nothing is
approximated by the expansion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

from trace_serve.engine import expert_forward, expert_weights, spec, state
from trace_serve.errors import EngineError
from trace_serve.recipe import BLOCK, Recipe

if TYPE_CHECKING:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig


class TraceNvFp4Config(QuantizationConfig):
    """`--quantization trace_nvfp4`: routed experts as the engine's recipe says, everything else unquantized."""

    supports_mixtral_moe = True

    def __init__(self) -> None:
        super().__init__()
        self.recipe: Recipe = state.get().spec.recipe

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TraceNvFp4Config:
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Keeps the method that the engine was started with, whatever a packed checkpoint's config declares."""
        return spec.QUANTIZATION if user_quant == spec.QUANTIZATION else None

    def get_name(self) -> str:
        return spec.QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, FusedMoE):
            if self.recipe.quantizes_experts(layer.layer_id):
                return TraceNvFp4MoEMethod(self.recipe)
            return UnquantizedFusedMoEMethod()
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None


class TraceNvFp4MoEMethod(UnquantizedFusedMoEMethod):
    """Experts whose weights, and with `w4a4` whose inputs too, are rounded to NVFP4.

    Shapes: hidden size and intermediate size a multiple of 16 and of the rotation width. SiLU-gated experts without
    bias on the CPU engine; anything else is refused when the layer is built.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def create_weights(self, layer: Any, *args: Any, with_bias: bool = False, **kwargs: Any) -> None:
        if with_bias:
            raise EngineError("experts with a bias cannot run in NVFP4; serve this model with experts='bf16'")
        super().create_weights(layer, *args, with_bias=with_bias, **kwargs)
        width = max(self.recipe.expert_rotation, BLOCK)
        for name in ("w13_weight", "w2_weight"):
            k = getattr(layer, name).shape[-1]
            if k % width:
                raise EngineError(
                    f"layer {layer.layer_id} {name}: reduction size {k} is not a multiple of {width}; "
                    "choose another expert_rotation, or serve this layer in BF16 (expert_layers)"
                )

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        super().create_moe_runner(layer, moe_runner_config)
        config = moe_runner_config
        unsupported = {
            "activation": config.activation != "silu",
            "is_gated": not config.is_gated,
            "apply_router_weight_on_input": config.apply_router_weight_on_input,
            "gemm1_alpha": config.gemm1_alpha is not None,
            "gemm1_clamp_limit": config.gemm1_clamp_limit is not None,
            "routed_scaling_factor": config.routed_scaling_factor not in (None, 1.0),
        }
        for field, bad in unsupported.items():
            if bad:
                raise EngineError(
                    f"experts with {field}={getattr(config, field)!r} cannot run in NVFP4 on this engine; "
                    "serve this model with experts='bf16'"
                )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces both weights by their NVFP4 image, see `expert_weights.quantize`."""
        expert_weights.quantize(layer)

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        out = expert_forward.run(self.recipe, layer, dispatch_output.hidden_states, topk_weights, topk_ids)
        return StandardCombineInput(hidden_states=out)
