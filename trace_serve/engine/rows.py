"""Reading the rows of KV slots: codes' lowest bits, scales, routed experts, and which forward pass wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_serve.engine import state
from trace_serve.hints.options import HintOptions, layers_of
from trace_serve.hints.rows import Site
from trace_serve.hints.slots import ExpertSlots


@dataclass(frozen=True)
class Rows:
    """Copies of the rows of T consecutive tokens of one request.

    Attributes:
        sites: rows whose `present` says that they belong to the pass that last wrote their slot.
        versions: int32 [T], weight version that the slot was written under.
        routed: int [T, MoE layers, top-k], or None where they are not captured.
    """

    sites: tuple[Site, ...]
    versions: NDArray[np.int32]
    routed: NDArray[Any] | None

    def __len__(self) -> int:
        return int(self.versions.shape[0])


def read(pool: Any, slots: Tensor, options: HintOptions) -> Rows:
    """Copies the rows of KV slots.

    Args:
        pool: SGLang's KV pool.
        slots: int64 [T].
        options: which sites and layers.
    """
    engine = state.get()
    assert engine.passes is not None
    numbers = engine.passes.numbers(slots)
    wanted = layers_of(options.layers, engine.layers)
    sites = []
    for name, kept in engine.expert_slots.items():
        if name in options.sites and (layers := _both(kept.layers, wanted)):
            sites.append(_experts(name, kept, slots, numbers, layers, codes=options.codes == "full"))
    written = (numbers >= 0).numpy()
    for name in ("k", "v"):
        if name in options.sites:
            sites.extend(_kv(name, pool, slots, wanted, written, codes=options.codes == "full"))
    return Rows(tuple(sites), engine.passes.versions(slots).numpy(), _routed(slots) if options.routed_experts else None)


def join(parts: Iterable[Rows]) -> Rows:
    """One after the other; all were read with the same options."""
    every = list(parts)
    first = every[0]
    if len(every) == 1:
        return first
    sites = tuple(_join_site([part.sites[i] for part in every]) for i in range(len(first.sites)))
    routed = [part.routed for part in every if part.routed is not None]
    versions = np.concatenate([part.versions for part in every])
    return Rows(sites, versions, np.concatenate(routed) if routed else None)


def _join_site(parts: list[Site]) -> Site:
    def over(get: Callable[[Site], NDArray[Any] | None]) -> Any:
        arrays = [get(part) for part in parts]
        return None if arrays[0] is None else np.concatenate([array for array in arrays if array is not None])

    return Site(
        name=parts[0].name,
        layers=parts[0].layers,
        bits=over(lambda s: s.bits),
        codes=over(lambda s: s.codes),
        scales=over(lambda s: s.scales),
        present=over(lambda s: s.present),
        global_log2=over(lambda s: s.global_log2),
        groups=parts[0].groups,
    )


def _both(kept: Iterable[int], wanted: tuple[int, ...]) -> tuple[int, ...]:
    chosen = set(wanted)
    return tuple(layer for layer in kept if layer in chosen)


def _experts(
    name: str, kept: ExpertSlots, slots: Tensor, numbers: Tensor, layers: tuple[int, ...], *, codes: bool
) -> Site:
    found = kept.read(slots, numbers, layers)
    return Site(
        name=name,
        layers=layers,
        bits=found.bits.numpy(),
        codes=found.codes.numpy() if codes and found.codes is not None else None,
        scales=found.scales.numpy(),
        global_log2=found.global_log2.numpy(),
        present=found.present.numpy(),
        groups=kept.groups,
    )


def _kv(
    name: str, pool: Any, slots: Tensor, wanted: tuple[int, ...], written: NDArray[np.bool_], *, codes: bool
) -> list[Site]:
    """K and V need no capture: the pool holds the codes and scales that attention used."""
    from trace_serve.engine.kv import method_of

    engine = state.get()
    method = method_of(pool)
    if method is None:
        return []
    quantized = [i for i, layer in zip(method.layer_ids, method.layers, strict=True) if layer.k_scales is not None]
    layer_ids = _both(quantized, wanted)
    if not layer_ids:
        return []
    indices = [method.layer_ids.index(layer) for layer in layer_ids]
    stored = [getattr(method.layers[i], name)[slots] for i in indices]
    scales = [getattr(method.layers[i], f"{name}_scales") for i in indices]
    return [
        Site(
            name=name,
            layers=layer_ids,
            bits=_stack([engine.kernels.hint_bits(layer).flatten(1) for layer in stored]).numpy(),
            codes=_stack([layer.flatten(1) for layer in stored]).numpy() if codes else None,
            scales=_stack([layer[slots].flatten(1) for layer in scales]).numpy(),
            present=written,
        )
    ]


def _stack(layers: list[Tensor]) -> Tensor:
    """A list over layers of [T, ...] as one contiguous [T, L, ...]."""
    return torch.stack(layers, dim=1).contiguous()


def _routed(slots: Tensor) -> NDArray[Any] | None:
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer = get_global_experts_capturer()
    return None if capturer is None else capturer.host_cache.buffer[slots].numpy()
