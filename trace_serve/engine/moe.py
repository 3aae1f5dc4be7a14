"""Routed experts in NVFP4: the quantization config and the MoE method that SGLang loads.

Weights load as BF16 and are replaced by their NVFP4 image. With power-of-two global scales BF16 holds that image
exactly, so a BF16 product of the images is the product of the NVFP4 values; nothing is approximated by the expansion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from torch import Tensor
from torch.nn.functional import linear, silu

from trace_serve import nvfp4
from trace_serve.engine import spec, state
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
        """Replaces both weights by their NVFP4 image, one global scale a matrix (gate and up share theirs).

        SGLang calls this again after every weight update, for layers that the update did not touch too. An image is
        told from freshly loaded weights by its fingerprint, so that nothing is rotated or rounded twice.

        Raises:
            EngineError: not on a CPU, or an update replaced the gate but not the up projection or the reverse.
        """
        engine = state.get()
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name).data
            if weight.device.type != "cpu":
                raise EngineError(
                    f"trace_nvfp4 experts run on the CPU engine in this version, got device {weight.device}"
                )
            parts = 2 if name == "w13_weight" else 1
            known: dict[int, tuple[int, ...]] = layer.__dict__.setdefault(f"_trace_{name}", {})
            for expert in range(weight.shape[0]):
                rows = weight[expert]
                fresh = [
                    a != b for a, b in zip(_fingerprint(rows, parts), known.get(expert, (0,) * parts), strict=True)
                ]
                if not any(fresh):
                    continue
                if not all(fresh):
                    raise EngineError(
                        f"layer {layer.layer_id} expert {expert}: the update replaced only one of gate and up, which "
                        "share a global scale; send both"
                    )
                rows.copy_(engine.kernels.fake_quantize_weight(rows, parts=parts, counters=engine.counters))
                known[expert] = _fingerprint(rows, parts)
        engine.flush_counters()

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        engine = state.get()
        x = dispatch_output.hidden_states
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        if self.recipe.experts == "w4a4":
            inputs, quantized = engine.kernels.fake_quantize_activations(
                x,
                static_scale=self.recipe.experts_in_scale(layer.layer_id),
                hints=engine.slots is not None,
                counters=engine.counters,
            )
            engine.capture_experts_in(layer.layer_id, quantized)
        else:
            inputs = self._rotated(x)
        out = self._experts(layer, inputs, topk_weights, topk_ids)
        engine.flush_counters()
        return StandardCombineInput(hidden_states=out)

    def _rotated(self, x: Tensor) -> Tensor:
        width = self.recipe.expert_rotation
        return nvfp4.rotate(x, width).to(x.dtype) if width else x

    def _experts(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """x [T, H] BF16 to [T, H] BF16.

        Products are BF16, SiLU and its product with the up projection are FP32 and rounded once, and experts are summed
        in FP32 in the order of their index.
        """
        engine = state.get()
        out = torch.zeros(x.shape[0], layer.w2_weight.shape[1], dtype=torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            if expert < 0:
                continue
            rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[rows], layer.w13_weight[expert]).float().chunk(2, dim=-1)
            middle = (silu(gate) * up).to(x.dtype)
            if self.recipe.experts == "w4a4":
                middle, _ = engine.kernels.fake_quantize_activations(
                    middle, static_scale=self.recipe.experts_mid_scale(layer.layer_id), counters=engine.counters
                )
            else:
                middle = self._rotated(middle)
            product = linear(middle, layer.w2_weight[expert])
            out.index_add_(0, rows, product.float() * topk_weights[rows, slots].float().unsqueeze(-1))
        return out.to(x.dtype)


def _fingerprint(rows: Tensor, parts: int) -> tuple[int, ...]:
    """Identifies the content of each of the `parts` equal row groups of a BF16 matrix."""
    return tuple(hash(part.contiguous().view(torch.uint8).numpy().tobytes()) for part in rows.chunk(parts))
