"""What a recipe costs in bytes of device memory."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from eval_gate.attribute.variants import Layout, Part, quantized_layers
from trace_serve.plan import BF16_BITS, NVFP4_BITS, Workload
from trace_serve.policy.dims import ModelDims
from trace_serve.recipe import Recipe

DEFAULT_KV_TOKENS = Workload().batch * Workload().context
"""Tokens of KV cache of the workload that `trace-serve plan` assumes."""


class Cost(BaseModel):
    """Bytes under one recipe.

    Attributes:
        weights_bytes: all weights: experts in FP4 at 4.5 bits a value, everything else in BF16.
        kv_bytes_per_token: K and V of one token in every layer that has a KV cache.
        kv_tokens: tokens of KV cache that the total is for.
    """

    model_config = ConfigDict(frozen=True)

    weights_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes_per_token * self.kv_tokens


@dataclass(frozen=True)
class CostModel:
    """Bytes of any recipe on one model, as `trace-serve plan` counts them.

    Attributes:
        kv_tokens: tokens of KV cache that weights are weighed against.
    """

    dims: ModelDims
    layout: Layout
    kv_tokens: int

    def __call__(self, recipe: Recipe) -> Cost:
        expert_layer = self.dims.expert_parameters // self.dims.layers
        packed = len(quantized_layers(recipe, Part.EXPERTS, self.layout))
        plain = len(self.layout.expert_layers) - packed
        weights = expert_layer * (packed * NVFP4_BITS + plain * BF16_BITS) + self.dims.other_parameters * BF16_BITS
        fp4 = len(quantized_layers(recipe, Part.KV, self.layout))
        kv = self.dims.kv_values * (fp4 * NVFP4_BITS + (len(self.layout.kv_layers) - fp4) * BF16_BITS)
        return Cost(weights_bytes=round(weights / 8), kv_bytes_per_token=round(kv / 8), kv_tokens=self.kv_tokens)
