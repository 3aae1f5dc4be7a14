"""Gathering a finished request's hints in the scheduler, before its KV slots are released.

Only the forward pass that finished the request is trusted: slots are looked up at that moment, so a request that was
retracted and prefilled again returns the rows of its last prefill, whose tokens and log-probabilities it also returns.
"""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trace_serve.engine import state
from trace_serve.hints import wire

logger = logging.getLogger(__name__)

META_KEY = "trace_hints"


def collect(processor: Any, req: Any) -> None:
    """Writes the hints of a finished request to its file, or attaches them to its answer.

    Args:
        processor: SGLang's batch result processor, which holds the request-to-token table.
        req: a finished request; one that did not ask for hints is left alone.
    """
    custom = getattr(req.sampling_params, "custom_params", None)
    wanted = custom.get(META_KEY) if isinstance(custom, dict) else None
    if wanted is None:
        return
    engine = state.get()
    try:
        payload = wire.to_bytes(_hint_file(processor, req))
        if wanted == "file":
            wire.write_bytes(Path(str(engine.spec.hint_dir)) / f"{req.rid}.safetensors", payload)
            engine.telemetry.add("hint_files", 1)
        else:
            _attach(req, base64.b64encode(payload).decode())
    except Exception:
        # The answer itself is sound; a full disk must not take the engine and every other request with it.
        engine.telemetry.add("hint_failures", 1)
        logger.exception("hints of request %s are lost", req.rid)


def _attach(req: Any, payload: str) -> None:
    """One entry an output token; the last one carries the payload, so that a stream sends it with its last chunk."""
    count = len(req.output_ids)
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info[META_KEY] = [None] * (count - 1) + [payload]


def condense(meta_info: dict[str, Any]) -> None:
    """Replaces the list with one entry an output token by its only payload, or removes it while there is none."""
    if META_KEY not in meta_info:
        return
    payloads = [value for value in meta_info.pop(META_KEY) or () if value]
    if payloads:
        meta_info[META_KEY] = payloads[-1]


def _hint_file(processor: Any, req: Any) -> wire.HintFile:
    from sglang.srt.runtime_context import get_serving

    engine = state.get()
    output = list(req.output_ids_through_stop)
    tokens = [*req.origin_input_ids, *output]
    rows = len(tokens) - 1 if output else len(tokens)
    slots = processor.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :rows].to(torch.int64)
    sites = _experts_in(slots) + _kv(processor.token_to_kv_pool_allocator.get_kvcache(), slots)
    routed = getattr(req, "routed_experts", None)
    return wire.HintFile(
        token_ids=np.asarray(tokens[:rows], dtype=np.int32),
        sites=tuple(sites),
        recipe_id=engine.spec.recipe.recipe_id,
        model_digest=engine.spec.policy_digest,
        weight_versions=((0, rows, str(get_serving().weight_version)),),
        routed_experts=None if routed is None else routed.numpy(),
        next_token_id=int(output[-1]) if output else None,
    )


def _experts_in(slots: Tensor) -> list[wire.Site]:
    engine = state.get()
    if engine.slots is None:
        return []
    found = engine.slots.read(slots, engine.weight_version)
    return [
        wire.Site(
            name="experts_in",
            layers=engine.slots.layers,
            bits=found.bits.numpy(),
            scales=found.scales.numpy(),
            global_log2=found.global_log2.numpy(),
            present=found.present.numpy(),
        )
    ]


def _kv(pool: Any, slots: Tensor) -> list[wire.Site]:
    """K and V need no capture: the pool holds the codes and scales that attention used."""
    from trace_serve.engine.kv import TraceNvFp4KVMethod

    engine = state.get()
    method = getattr(pool, "quant_method", None)
    if not isinstance(method, TraceNvFp4KVMethod) or engine.versions is None:
        return []
    present = engine.versions.present(slots, engine.weight_version).numpy()
    indices = [i for i, layer in enumerate(method.layers) if layer.k_scales is not None]
    stored = {
        "k": [(method.layers[i].k, method.layers[i].k_scales) for i in indices],
        "v": [(method.layers[i].v, method.layers[i].v_scales) for i in indices],
    }
    return [
        wire.Site(
            name=name,
            layers=tuple(indices),
            bits=_stack([engine.kernels.hint_bits(codes[slots]).flatten(1) for codes, _ in layers]).numpy(),
            scales=_stack([scales[slots].flatten(1) for _, scales in layers if scales is not None]).numpy(),
            global_log2=None,
            present=present,
        )
        for name, layers in stored.items()
    ]


def _stack(layers: list[Tensor]) -> Tensor:
    """A list over layers of [T, ...] as one contiguous [T, L, ...]."""
    return torch.stack(layers, dim=1).contiguous()
