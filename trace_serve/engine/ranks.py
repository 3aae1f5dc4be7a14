"""One model on several tensor-parallel ranks: what a recipe's numbers mean there, and rows put together again.

Each rank holds every expert's slice of the intermediate size and its share of the KV heads. A global scale is a number
of the whole row or the whole matrix, never of a slice, so maxima are combined over the ranks: any number of ranks
rounds on the same grid. A rank's rows are its slice; rank 0 answers, so it gathers the others'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import EngineError
from trace_serve.recipe import BLOCK, Recipe

if TYPE_CHECKING:
    from trace_serve.engine.rows import Rows
    from trace_serve.hints.rows import Site


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks of one model.

    Attributes:
        rank: 0 is the one that answers.
        size: ranks, 1 without tensor parallelism.
        group: their process group for CPU tensors; None where there is one rank.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each value over all ranks; every rank has to ask for the same values at the same time."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def require_same(self, choice: Sequence[bool], what: str) -> None:
        """Raises:
        EngineError: another rank chose otherwise; it raises there too, instead of waiting for this one for ever.
        """
        if self.size == 1:
            return
        mine = torch.tensor([[value, not value] for value in choice], dtype=torch.uint8)
        if bool((self.largest(mine.clone()) != mine).any()):
            raise EngineError(f"ranks differ in {what}; send the same update to every rank")

    def gather(self, local: Rows | str, widths: Mapping[str, int]) -> Rows | str | None:
        """Puts the rows of one request together on rank 0.

        Every rank calls this for the same requests in the same order.

        Args:
            local: this rank's rows, or why it has none.
            widths: blocks of each site, see `assemble`.

        Returns:
            On rank 0 the whole rows, or why there are none; None on the others.
        """
        if self.size == 1:
            return local if isinstance(local, str) else assemble([local], widths)
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        first = dist.get_process_group_ranks(self.group)[0]
        dist.gather_object(local, everyone, dst=first, group=self.group)
        if everyone is None:
            return None
        failures = [f"rank {i}: {found}" for i, found in enumerate(everyone) if isinstance(found, str)]
        return "; ".join(failures) if failures else assemble(everyone, widths)


def current() -> Ranks:
    """The ranks of the running scheduler, once SGLang has set up its process groups."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1:
        return Ranks()
    return Ranks(parallel.tp_rank, parallel.tp_size, parallel.tp_group.cpu_group)


def widths_of(model_config: Any) -> dict[str, int]:
    """Blocks of 16 in a row of each site that ranks share, of one group: see `assemble`.

    Args:
        model_config: SGLang's, before it pads heads and intermediate size to what the ranks divide.
    """
    text = model_config.hf_text_config
    middle = int(getattr(text, "moe_intermediate_size", 0) or getattr(text, "intermediate_size", 0))
    heads = model_config.get_total_num_kv_heads() * model_config.head_dim // BLOCK
    return {"k": heads, "v": heads, "experts_mid": middle // BLOCK}


def assemble(parts: Sequence[Rows], widths: Mapping[str, int]) -> Rows:
    """The rows of one request from those of all ranks, in their order.

    Args:
        parts: one a rank. SGLang pads heads and intermediate sizes that the ranks do not divide, at the end.
        widths: blocks of each shared site (`k`, `v`, `experts_mid`: of one expert) without padding.

    Raises:
        EngineError: ranks differ in what has to be the same on all of them.
    """
    first = parts[0]
    for rank, part in enumerate(parts[1:], 1):
        same = np.array_equal(part.versions, first.versions) and len(part.sites) == len(first.sites)
        pairs = zip(part.sites, first.sites, strict=False)
        if not same or any((a.name, a.layers) != (b.name, b.layers) for a, b in pairs):
            raise EngineError(f"rank {rank} read other rows than rank 0: {len(part)} and {len(first)} tokens")
    sites = tuple(_site([part.sites[i] for part in parts], widths) for i in range(len(first.sites)))
    return replace(first, sites=sites)


def _site(parts: Sequence[Site], widths: Mapping[str, int]) -> Site:
    first = parts[0]
    present = np.logical_and.reduce([part.present for part in parts])
    if first.name not in widths:
        # Every rank rounds the whole of it, so the copies are equal.
        return replace(first, present=present)
    if first.global_log2 is not None and any(
        not np.array_equal(_required(part.global_log2), first.global_log2) for part in parts
    ):
        raise EngineError(f"{first.name}: ranks have other global scales of the same rows")
    width = widths[first.name]
    bits = _joined([part.bits for part in parts], first.groups, width)
    scales = _joined([_required(part.scales) for part in parts], first.groups, width)
    codes = None
    if first.codes is not None:
        codes = _joined([_required(part.codes) for part in parts], first.groups, width * BLOCK // 2)
    return replace(first, bits=bits, scales=scales, codes=codes, present=present)


def _joined(slices: Sequence[NDArray[Any]], groups: int, width: int) -> NDArray[Any]:
    """[T, L, G * n] of every rank to [T, L, G * width], the slices of one group beside each other."""
    tokens, layers, blocks = slices[0].shape
    if len(slices) == 1 and blocks == groups * width:
        return slices[0]
    whole = np.concatenate([one.reshape(tokens, layers, groups, -1) for one in slices], axis=3)
    return np.ascontiguousarray(whole[..., :width].reshape(tokens, layers, -1))


def _required(array: NDArray[Any] | None) -> NDArray[Any]:
    assert array is not None
    return array


def slice_of_weight(ranks: Ranks, recipe: Recipe, weight: Tensor, parts: int, counters: Tensor) -> Tensor:
    """The NVFP4 image of this rank's slice of one expert's matrix, under the global scale of the whole matrix.

    Args:
        ranks: all of them call this for the same matrix.
        recipe: with power-of-two global scales, the only ones that this engine runs.
        weight: BF16 [N, K]; gate rows before up rows.
        parts: 2 for gate and up, 1 for a single projection.
        counters: int64 [3], incidents are added in place.
    """
    rotated = nvfp4.rotate(weight, recipe.expert_rotation)
    groups = parts if recipe.gate_up_scale == "split" else 1
    grouped = rotated.reshape(groups, -1, weight.shape[1])
    amax = ranks.largest(nvfp4.finite_amax(grouped, (1, 2)))
    scale = nvfp4.pow2_global_scale(amax, recipe.global_scale_max).repeat_interleave(grouped.shape[1])
    kept = nvfp4.quantize(rotated, scale, recipe, operand="weights", counters=counters)
    return nvfp4.dequantize(kept, torch.bfloat16)


def slices_of_rows(
    ranks: Ranks, recipe: Recipe, x: Tensor, static_scale: float | None, hints: bool, counters: Tensor
) -> tuple[Tensor, nvfp4.Quantized]:
    """Quantizes this rank's slices of the second product's input rows, under the global scales of the whole rows.

    Args:
        ranks: all of them call this with slices of the same rows in the same order.
        recipe: with power-of-two global scales.
        x: BF16 [N, K / ranks].
        static_scale: the recipe's scale of the site, where it has one.
        hints: whether to return the lowest bit of every code too.
        counters: int64 [3], incidents are added in place.

    Returns:
        The values kept, BF16 [N, K / ranks], and their codes.
    """
    rotated = nvfp4.rotate(x, recipe.expert_rotation)
    if static_scale is None:
        amax = ranks.largest(nvfp4.finite_amax(rotated))
        scale = nvfp4.pow2_global_scale(amax, nvfp4.rules(recipe, "activations").scale_max)
    else:
        scale = torch.full((x.shape[0],), static_scale, dtype=torch.float32)
    kept = nvfp4.quantize(rotated, scale, recipe, counters=counters)
    values = nvfp4.dequantize(kept, torch.bfloat16)
    return values, replace(kept, hints=nvfp4.hint_bits(kept.codes)) if hints else kept
