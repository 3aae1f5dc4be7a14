"""FlashInfer's MoE stages in torch, from their documentation: they read the layouts that we prepare and sum in float64.

What the documentation leaves undefined is poison here: rows between the pairs are NaN, entries of the routing tables
behind the last tile are out of range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from trace_serve.kernels.flashinfer.experts import Stages
from trace_serve.nvfp4 import e4m3, unpack_values

POISON = 1 << 24


def scales_in_row_order(view: Tensor) -> Tensor:
    """[32, 4, tiles of 128 rows, 4, tiles of 4 columns, groups] to [groups, rows, columns]: row 128*t + 32*i + o is at
    (o, i, t), column 4*u + c at (c, u)."""
    return view.permute(5, 2, 1, 0, 4, 3).reshape(view.shape[5], view.shape[2] * 128, view.shape[4] * 4)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 code times block scale; scales in row order."""
    return unpack_values(codes).double() * e4m3.decode(scales.view(torch.uint8)).double().repeat_interleave(16, dim=-1)


def sort(
    *,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    num_experts: int,
    top_k: int,
    local_expert_offset: int,
    num_local_experts: int,
    tile_tokens_dim: int,
    enable_pdl: bool,
) -> tuple[Tensor, ...]:
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    pairs = token_selected_experts.flatten().tolist()
    tiles = (len(pairs) + (tile_tokens_dim - 1) * num_local_experts) // tile_tokens_dim
    to_pair = torch.full((tiles * tile_tokens_dim,), POISON, dtype=torch.int32)
    to_permuted = torch.full((len(pairs),), -1, dtype=torch.int32)
    experts, limits = (torch.full((tiles,), POISON, dtype=torch.int32) for _ in range(2))
    used = 0
    for local in range(num_local_experts):
        mine = [p for p, expert in enumerate(pairs) if expert == local + local_expert_offset]
        start = used * tile_tokens_dim
        for i, pair in enumerate(mine):
            to_pair[start + i] = pair
            to_permuted[pair] = start + i
        needed = -(-len(mine) // tile_tokens_dim)
        to_pair[start + len(mine) : start + needed * tile_tokens_dim] = -1
        experts[used : used + needed] = local
        limits[used : used + needed] = start + len(mine)
        used += needed
    total = torch.tensor([used * tile_tokens_dim], dtype=torch.int32)
    return experts, limits, to_permuted.view(-1, top_k), to_pair, total, torch.tensor([used], dtype=torch.int32)


def _rows_of_tiles(experts: Tensor, limits: Tensor, count: Tensor, to_pair: Tensor) -> Any:
    for tile in range(int(count)):
        rows = torch.arange(tile * 128, min((tile + 1) * 128, int(limits[tile])))
        yield int(experts[tile]), rows, to_pair[rows].long()


def gemm1(
    *,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor,
    tile_idx_to_expert_idx: Tensor,
    tile_idx_to_mn_limit: Tensor,
    token_id_mapping: Tensor,
    num_non_exiting_tiles: Tensor,
    a_per_token_scale: Tensor,
    topk: int,
    **options: Any,
) -> tuple[Tensor, None]:
    assert options["c_dtype"] == "bfloat16"
    assert not options["quantize_output"]
    assert a.is_contiguous()
    assert a_scale.shape == (a.shape[0], a.shape[1] // 8)
    assert b.shape[1] % 128 == 0
    rows_in = values(a, a_scale)
    weights = values(b, scales_in_row_order(b_scale))
    out = torch.full((token_id_mapping.shape[0], b.shape[1] // 2), torch.nan, dtype=torch.bfloat16)
    tiles = _rows_of_tiles(tile_idx_to_expert_idx, tile_idx_to_mn_limit, num_non_exiting_tiles, token_id_mapping)
    for expert, rows, pairs in tiles:
        tokens = pairs // topk
        factor = (a_per_token_scale[tokens].double() * alpha[expert].double()).unsqueeze(-1)
        products = (rows_in[tokens] @ weights[expert].T) * factor
        up, gate = products.view(len(rows), -1, 2, 64).unbind(dim=2)
        out[rows] = (silu(gate) * up).flatten(1).to(torch.bfloat16)
    return out, None


def gemm2(
    *,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor,
    tile_idx_to_expert_idx: Tensor,
    num_non_exiting_tiles: Tensor,
    tile_idx_to_mn_limit: Tensor,
    permuted_idx_to_expanded_idx: Tensor,
    token_final_scales: Tensor,
    out: Tensor,
    a_per_token_scale: Tensor,
    **options: Any,
) -> Tensor:
    assert not options["use_fused_finalize"]
    assert a.is_contiguous()
    assert a_per_token_scale.shape == (a.shape[0],)
    rows_in = values(a, scales_in_row_order(a_scale)[0])
    weights = values(b, scales_in_row_order(b_scale))
    out.fill_(torch.nan)
    tiles = _rows_of_tiles(
        tile_idx_to_expert_idx, tile_idx_to_mn_limit, num_non_exiting_tiles, permuted_idx_to_expanded_idx
    )
    for expert, rows, pairs in tiles:
        factor = (a_per_token_scale[rows].double() * alpha[expert].double()).unsqueeze(-1)
        out[pairs] = ((rows_in[rows] @ weights[expert].T) * factor).to(torch.bfloat16)
    return out


def unpermute(
    *,
    permuted_input: Tensor,
    output: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    topk_scales: Tensor,
    num_tokens: int,
    top_k: int,
    enable_pdl: bool,
    input_is_expanded: bool,
) -> None:
    assert input_is_expanded
    total = torch.zeros(output.shape, dtype=torch.float32)
    rows = permuted_input.view(num_tokens, top_k, -1)
    for slot in range(top_k):
        here = expanded_idx_to_permuted_idx[:, slot] >= 0
        total[here] += topk_scales[here, slot].unsqueeze(-1) * rows[here, slot].float()
    output.copy_(total)


STAGES = Stages(sort=sort, gemm1=gemm1, gemm2=gemm2, unpermute=unpermute)
