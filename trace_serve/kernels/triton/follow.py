"""Launches the kernel that rounds rows as a rollout did, by its scales and lowest bits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from trace_serve.kernels.triton import _jit, block_rules, follow_kernel, plan, rows
from trace_serve.kernels.triton.quantize import QuantizedRows, addressable
from trace_serve.nvfp4 import Quantized, Rules
from trace_serve.recipe import BLOCK

_KINDS = {"none": follow_kernel.NO_SCALES, "lsb": follow_kernel.SCALE_BITS, "byte": follow_kernel.SCALE_BYTES}


def supports(rules: Rules, columns: int) -> bool:
    """Whether `follow_rows` computes rows of that many values under these rules."""
    return block_rules.supports(rules) and 0 < columns <= plan.MAX_ROW_BLOCKS * BLOCK


def follow_rows(
    x: Tensor,
    bits: Tensor,
    scales: Tensor | None,
    *,
    scale_kind: str,
    rules: Rules,
    tau: float,
    global_scale: Tensor | None = None,
    rollout_scale: Tensor | None = None,
    present: Tensor | None = None,
    values: bool = False,
) -> QuantizedRows:
    """What `guided.guided_quantize` keeps of rows, bit for bit, in one launch; shapes are the caller's to check.

    Args:
        x: bfloat16, float16 or float32 [N, K], as `supports` allows.
        bits: uint16 or int32 [N, K/16].
        scales: uint8 [N, K/16], bytes or lowest bits as `scale_kind` (`byte`, `lsb`, `none`) says.
        rules: of the operand.
        tau: guard in (0, 0.5].
        global_scale: fp32 [N], the trainer's own; None takes each row's, as the rules say.
        rollout_scale: fp32 [N]; None takes the trainer's.
        present: bool [N]; rows where it is False are rounded to nearest.
        values: return what the codes stand for too, in bfloat16, or in float32 unless `x` is bfloat16.
    """
    n, k = x.shape
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device=x.device)
    out_scales = torch.empty((n, k // BLOCK), dtype=torch.uint8, device=x.device)
    kept_scale = torch.empty(n, dtype=torch.float32, device=x.device)
    packed = x.dtype == torch.bfloat16
    kept = None
    if values:
        kept = torch.empty((n, k), dtype=torch.bfloat16 if packed else torch.float32, device=x.device)
    out = QuantizedRows(Quantized(codes, out_scales, kept_scale), kept)
    if n == 0:
        return out
    x = addressable(x).contiguous()
    k_blocks = k // BLOCK
    cut = plan.plan_rows_interpreted(k_blocks) if _jit.INTERPRETED else plan.plan_rows(k_blocks, n, unpacked=True)
    mode = rows.POW2_PER_TOKEN if rules.token_scale == "pow2_per_token" else rows.PER_TOKEN
    _jit.launch(
        follow_kernel.follow_rows_kernel,
        (triton.cdiv(n, cut.rows),),
        x.view(torch.int32) if packed else x,
        (bits.view(torch.int16) if bits.dtype == torch.uint16 else bits).contiguous(),
        out_scales if scales is None else scales.contiguous(),
        kept_scale if global_scale is None else global_scale.contiguous(),
        kept_scale if rollout_scale is None else rollout_scale.contiguous(),
        codes if present is None else present.contiguous().view(torch.uint8),
        codes.view(torch.int64),
        out_scales,
        kept_scale,
        codes if kept is None else kept.view(torch.int32) if packed else kept,
        n * k_blocks,
        cut.chunks,
        tau,
        k_blocks=k_blocks,
        rows_held=cut.rows,
        lanes=cut.lanes,
        mode=(mode if global_scale is None else rows.GIVEN).value,
        scale_max=int(rules.scale_max),
        kind=_KINDS[scale_kind].value,
        packed=packed,
        with_rollout_scale=rollout_scale is not None,
        with_present=present is not None,
        with_values=values,
        rules=block_rules.number_of(rules),
        level=_jit.device_level(x.device),
        num_warps=cut.num_warps,
    )
    return out
