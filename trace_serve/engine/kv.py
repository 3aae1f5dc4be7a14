"""The attention KV cache in NVFP4: the pool's buffers, the write path and the read path.

The pool holds packed codes and E4M3 block scales, in the layout that a card holds, and nothing else; attention reads
dequantize the slots that it gathers, never the whole pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    KV_CACHE_ATTENTION_ACCESS_REGISTRY,
    KV_CACHE_QUANT_REGISTRY,
    KVCacheAttentionAccess,
    KVCacheAttentionAccessKind,
    KVCacheAttentionPhase,
    KVCacheBackendMatcher,
    KVCacheQuantMethodBase,
)
from torch import Tensor

from trace_serve.engine import state
from trace_serve.engine.gathered import GatheredKV
from trace_serve.errors import EngineError
from trace_serve.recipe import BLOCK

NAME = "trace_nvfp4"


@dataclass(frozen=True)
class LayerBuffers:
    """One layer of the pool; scales are None where the layer stays BF16.

    Attributes:
        k, v: uint8 [slots, heads, D/2], or bfloat16 [slots, heads, D].
        k_scales, v_scales: uint8 [slots, heads, D/16].
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None


class TraceNvFp4KVMethod(KVCacheQuantMethodBase):
    """K and V of the recipe's layers in NVFP4 with static global scales; other layers in BF16.

    K is stored rotated when the recipe says so; `hooks.kv` rotates the queries of those layers, so that scores are
    those of the unrotated product.

    Attributes:
        layers: the pool's buffers, in the pool's own order.
        layer_ids: the model's layer index of each of them. A hybrid model keeps K and V of its full-attention layers
            only, so the two differ, and recipes and hints go by the model's.
    """

    name = NAME
    SCALE_BLOCK_SIZE = BLOCK

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.recipe = state.get().spec.recipe
        self.layer_ids = tuple(layer_ids)
        self.layers: list[LayerBuffers] = []
        self._index_of: dict[int, int] = {}

    def create_buffers(self, size: int, head_num: int, head_dim: int, layer_num: int, device: str) -> dict[str, Any]:
        width = max(BLOCK, self.recipe.k_rotation)
        if head_dim % width:
            raise EngineError(f"KV head_dim {head_dim} is not a multiple of {width}; choose another k_rotation")
        if torch.device(device).type != "cpu":
            raise EngineError(f"the trace_nvfp4 KV cache runs on the CPU engine in this version, got device {device}")
        if layer_num != len(self.layer_ids):
            raise EngineError(f"the KV pool has {layer_num} layers, expected {len(self.layer_ids)}: {self.layer_ids}")
        for layer in self.layer_ids:
            fp4 = self.recipe.quantizes_kv(layer)
            shape = (size, head_num, head_dim // 2 if fp4 else head_dim)
            dtype = torch.uint8 if fp4 else torch.bfloat16
            k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            scale_shape = (size, head_num, head_dim // BLOCK)
            scales = [torch.zeros(scale_shape, dtype=torch.uint8, device=device) if fp4 else None for _ in range(2)]
            self.layers.append(LayerBuffers(k, v, *scales))
        self._index_of = {id(tensor): i for i, layer in enumerate(self.layers) for tensor in (layer.k, layer.v)}
        # SGLang indexes these lists by layer; a BF16 layer has no scales, and an empty tensor says so.
        empty = torch.zeros(0, dtype=torch.uint8, device=device)
        return {
            "k_buffer": [layer.k for layer in self.layers],
            "v_buffer": [layer.v for layer in self.layers],
            "k_scale_buffer": [empty if layer.k_scales is None else layer.k_scales for layer in self.layers],
            "v_scale_buffer": [empty if layer.v_scales is None else layer.v_scales for layer in self.layers],
            "dq_k_buffer": None,
            "dq_v_buffer": None,
            "store_dtype": torch.uint8,
        }

    def quantize_and_store(
        self,
        k_buffer: Tensor,
        v_buffer: Tensor,
        k_scale_buffer: Tensor | None,
        v_scale_buffer: Tensor | None,
        loc: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        native_k_scale_buffer: Tensor | None = None,
        native_v_scale_buffer: Tensor | None = None,
    ) -> None:
        index = self._index_of[id(k_buffer)]
        layer = self.layers[index]
        if layer.k_scales is None or layer.v_scales is None:
            layer.k[loc], layer.v[loc] = cache_k, cache_v
            return
        k_global, v_global = self.recipe.kv_scales(self.layer_ids[index])
        self._store(layer.k, layer.k_scales, loc, cache_k, k_global, self.recipe.k_rotation)
        self._store(layer.v, layer.v_scales, loc, cache_v, v_global, 0)

    def _store(
        self, codes: Tensor, scales: Tensor, loc: Tensor, values: Tensor, global_scale: float, rotation: int
    ) -> None:
        engine = state.get()
        rows = values.reshape(-1, values.shape[-1])
        quantized = engine.kernels.quantize_kv(
            rows, global_scale=global_scale, rotation=rotation, counters=engine.counters
        )
        heads = codes.shape[1]
        codes[loc] = quantized.codes.view(-1, heads, codes.shape[2])
        scales[loc] = quantized.scales.view(-1, heads, scales.shape[2])

    def dequantize_kv_tensor(
        self, fp4_tensor: Tensor, scales: Tensor, layer_id: int, dtype: torch.dtype | None = None
    ) -> Any:
        if fp4_tensor.dtype == torch.bfloat16:
            return fp4_tensor
        index = self._index_of[id(fp4_tensor)]
        k_global, v_global = self.recipe.kv_scales(self.layer_ids[index])
        return GatheredKV(fp4_tensor, scales, k_global if fp4_tensor is self.layers[index].k else v_global)

    def dequantize_prev_kv(
        self, k_fp4: Tensor, k_scales: Tensor, v_fp4: Tensor, v_scales: Tensor, layer_id: int
    ) -> tuple[Tensor, Tensor]:
        raise EngineError("trace_nvfp4 KV has no dequant workspace; use --attention-backend torch_native")

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        """Bytes a token of K and V over all layers; `num_layers` and `kv_size` are not used, the recipe decides."""
        fp4_layers = sum(self.recipe.quantizes_kv(layer) for layer in self.layer_ids)
        fp4_bytes = head_dim // 2 + head_dim // BLOCK
        return 2 * head_num * (fp4_layers * fp4_bytes + (len(self.layer_ids) - fp4_layers) * 2 * head_dim)

    def bytes_per_token(self) -> int:
        """Bytes a token that the allocated buffers take."""
        return sum(t.nbytes // t.shape[0] for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every buffer of the pool: codes, or BF16 values, and block scales."""
        return [t for layer in self.layers for t in (layer.k, layer.v, layer.k_scales, layer.v_scales) if t is not None]


def method_of(pool: Any) -> TraceNvFp4KVMethod | None:
    """Our method of a KV pool or, in a hybrid model, of the pool inside it; None where the pool is SGLang's own."""
    method = getattr(attention_pool(pool), "quant_method", None)
    return method if isinstance(method, TraceNvFp4KVMethod) else None


def attention_pool(pool: Any) -> Any:
    """The pool that holds K and V: `pool` itself, or the one inside a hybrid model's."""
    return getattr(pool, "full_kv_pool", pool)


def register() -> None:
    """Adds the method and how attention reads it to SGLang's registries."""
    readers = KVCacheBackendMatcher(exact=frozenset({"torch_native"}))
    KV_CACHE_QUANT_REGISTRY[NAME] = TraceNvFp4KVMethod
    KV_CACHE_ATTENTION_ACCESS_REGISTRY[NAME] = tuple(
        KVCacheAttentionAccess(
            phase,
            KVCacheAttentionAccessKind.PLAIN,
            readers,
            storage_dtype=torch.uint8,
            attention_kv_dtype=torch.bfloat16,
            scale_recipe="nvfp4",
        )
        for phase in (KVCacheAttentionPhase.PREFILL, KVCacheAttentionPhase.DECODE)
    )
