"""Fake quantization that rounds as a rollout did, with the straight-through gradient.

Three modes, for a tensor whose rollout left outcomes:

- `nearest`: the recipe's own rounding; outcomes are ignored.
- `guided`: the rollout's block scales and lowest bits, followed where `rule` says that they can be believed.
- `replay`: the rollout's codes and scales as they were; the trainer's values decide nothing but the gradient.

Outcomes that equal the trainer's own give bitwise what `nearest` gives. On a card the guided mode is one Triton kernel
where that computes the recipe (`guided.fused`); plain torch is its definition, and what runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from trace_serve.errors import ConfigError, ShapeError
from trace_serve.guided.outcomes import Outcomes, unpack_bits
from trace_serve.guided.rule import TAU_ALIGNED, check_tau, follow_parity, follow_scale_parity
from trace_serve.nvfp4 import e4m3, packing
from trace_serve.nvfp4.block_scale import Operand, Rules, fill_zero_scales, rules, unrounded
from trace_serve.nvfp4.fake import straight_through
from trace_serve.nvfp4.global_scale import FLOAT32_MAX, GlobalScale, token_global_scale
from trace_serve.nvfp4.quantize import Quantized, check_blocks, dequantize, quantize
from trace_serve.recipe import BLOCK, Recipe

if TYPE_CHECKING:
    from trace_serve.kernels.triton.quantize import QuantizedRows

Mode = Literal["nearest", "guided", "replay"]


def guided_fake_quantize(
    x: Tensor,
    outcomes: Outcomes,
    recipe: Recipe,
    *,
    operand: Operand = "activations",
    global_scale: Tensor | float | None = None,
    mode: Mode = "guided",
    tau: float = TAU_ALIGNED,
) -> Tensor:
    """The values that `guided_quantize` keeps, in the shape and dtype of `x`; the gradient passes to `x` unchanged.

    Args, Raises: as `guided_quantize`.
    """
    if mode == "guided":
        rows = _fused(x.detach(), outcomes, recipe, operand, global_scale, tau, values=True)
        if rows is not None and rows.values is not None:
            return straight_through(x, rows.values.to(x.dtype).reshape(x.shape))
    kept = guided_quantize(x.detach(), outcomes, recipe, operand=operand, global_scale=global_scale, mode=mode, tau=tau)
    return straight_through(x, dequantize(kept, x.dtype))


def guided_quantize(
    x: Tensor,
    outcomes: Outcomes,
    recipe: Recipe,
    *,
    operand: Operand = "activations",
    global_scale: Tensor | float | None = None,
    mode: Mode = "guided",
    tau: float = TAU_ALIGNED,
) -> Quantized:
    """Quantizes along the last dimension toward the rollout's outcomes.

    Args:
        x: the trainer's values, bfloat16, float16 or float32 [..., K].
        outcomes: of the same tensor in the rollout.
        recipe: that of the rollout.
        operand: whose choices of the recipe apply.
        global_scale: the trainer's own, for rows without outcomes or outcomes without one; None takes each token's, as
            the recipe says.
        mode: see the module.
        tau: guard in (0, 0.5]; see `rule`.

    Returns:
        `Quantized` with global_scale [...].

    Raises:
        ShapeError: outcomes of another shape or dtype, an unknown mode, or as `quantize`.
        ConfigError: `replay` without codes or scale bytes; lowest bits of scales under a recipe with 4over6, whose
            choice of two scales a bit cannot tell.
    """
    check_blocks(x)
    outcomes.check(x)
    if mode not in ("nearest", "guided", "replay"):
        raise ShapeError(f"mode: got {mode!r}, expected nearest, guided or replay", field="mode")
    if mode == "guided":
        rows = _fused(x, outcomes, recipe, operand, global_scale, tau, values=False)
        if rows is not None:
            kept, shape = rows.quantized, x.shape[:-1]
            return Quantized(
                kept.codes.reshape(*shape, -1), kept.scales.reshape(*shape, -1), kept.global_scale.reshape(shape)
            )
    applied = rules(recipe, operand)
    own = _own_scale(x, recipe, global_scale)
    nearest = quantize(x, own.decode, recipe, operand=operand, encode_scale=own.encode)
    nearest = Quantized(nearest.codes, nearest.scales, nearest.global_scale.expand(x.shape[:-1]))
    if mode == "nearest":
        return nearest
    shared = _shared_scale(own, outcomes.global_scale)
    followed = _replayed(outcomes, shared) if mode == "replay" else _followed(x, outcomes, shared, applied, tau)
    return _merge(followed, nearest, outcomes.present)


def normalized(
    x: Tensor,
    outcomes: Outcomes,
    recipe: Recipe,
    *,
    operand: Operand = "activations",
    global_scale: float | None = None,
) -> Tensor:
    """The trainer's values divided by the rollout's scales, which is what `guided` rounds: fp32 [..., K].

    Args, Raises: as `guided_quantize`; the bits of `outcomes` are not used.
    """
    check_blocks(x)
    outcomes.check(x)
    shared = _shared_scale(_own_scale(x, recipe, global_scale), outcomes.global_scale)
    return _normalized(x, outcomes, shared, rules(recipe, operand)).u.reshape(x.shape)


@dataclass(frozen=True)
class _Normalized:
    """Values under the rollout's scales: fp32 [..., B, 16]; scale bytes and which blocks are finite [..., B]."""

    u: Tensor
    scale_bytes: Tensor
    usable: Tensor


def _fused(
    x: Tensor,
    outcomes: Outcomes,
    recipe: Recipe,
    operand: Operand,
    global_scale: Tensor | float | None,
    tau: float,
    *,
    values: bool,
) -> QuantizedRows | None:
    """What one kernel gives on a card; None where plain torch has to."""
    if x.device.type != "cuda":
        return None
    # Triton is loaded where there is a card alone.
    from trace_serve.guided.fused import fused

    check_blocks(x)
    outcomes.check(x)
    check_tau(tau)
    return fused(x, outcomes, recipe, operand=operand, global_scale=global_scale, tau=tau, values=values)


def _own_scale(x: Tensor, recipe: Recipe, given: Tensor | float | None) -> GlobalScale:
    if given is None:
        return token_global_scale(x, recipe)
    scale = torch.as_tensor(given, dtype=torch.float32, device=x.device)
    return GlobalScale(scale.expand(x.shape[:-1]), None)


def _shared_scale(own: GlobalScale, rollout: Tensor | None) -> GlobalScale:
    """The rollout's global scale. Where the trainer's is the same, so is the number S that it was computed from."""
    if rollout is None:
        return own
    decode = rollout.to(own.decode.device, torch.float32).expand(own.decode.shape)
    if own.encode is None:
        return GlobalScale(decode, None)
    return GlobalScale(decode, torch.where(decode == own.decode, own.encode, decode.reciprocal()))


def _replayed(outcomes: Outcomes, shared: GlobalScale) -> Quantized:
    if outcomes.codes is None or outcomes.scales is None or outcomes.scale_kind != "byte":
        raise ConfigError("mode: replay needs every code and scale byte of the rollout; use guided", field="mode")
    return Quantized(packing.pack(outcomes.codes), outcomes.scales, shared.decode)


def _normalized(x: Tensor, outcomes: Outcomes, shared: GlobalScale, applied: Rules) -> _Normalized:
    encode = (shared.decode.reciprocal() if shared.encode is None else shared.encode).unsqueeze(-1)
    decode = shared.decode.unsqueeze(-1) if shared.encode is None else encode.reciprocal()
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    usable = blocks.isfinite().all(dim=-1)
    blocks = blocks.masked_fill(~usable.unsqueeze(-1), 0)
    scale_byte = _scale_bytes(blocks, outcomes, encode, decode, applied)
    divisor = e4m3.decode(scale_byte) * decode
    if applied.reciprocal == "divide":
        u = blocks / divisor.unsqueeze(-1)
    else:
        u = blocks * divisor.reciprocal().clamp(max=FLOAT32_MAX).unsqueeze(-1)
    return _Normalized(u.masked_fill((divisor == 0).unsqueeze(-1), 0), scale_byte, usable)


def _followed(x: Tensor, outcomes: Outcomes, shared: GlobalScale, applied: Rules, tau: float) -> Quantized:
    found = _normalized(x, outcomes, shared, applied)
    bits = unpack_bits(outcomes.bits).reshape(found.u.shape)
    codes = follow_parity(found.u, bits, tau=tau)
    # A block that the rollout's scale made zero has no parity to follow: all its codes are 0.
    codes = codes.masked_fill((found.scale_bytes == 0).unsqueeze(-1), 0)
    scale_byte = found.scale_bytes.masked_fill(~found.usable, e4m3.NAN_BYTE)
    return Quantized(packing.pack(codes.reshape(x.shape)), scale_byte, shared.decode)


def _scale_bytes(blocks: Tensor, outcomes: Outcomes, encode: Tensor, decode: Tensor, applied: Rules) -> Tensor:
    if outcomes.scale_kind == "byte":
        assert outcomes.scales is not None
        return outcomes.scales
    if applied.four_over_six:
        raise ConfigError(
            "scale_kind: a recipe with 4over6 chooses between two scales; export hints with scale bytes", field="scale"
        )
    own = unrounded(applied.scale_formula, blocks.abs().amax(dim=-1), encode, decode)
    rounded = e4m3.encode(own) if outcomes.scales is None else follow_scale_parity(own, outcomes.scales)
    return fill_zero_scales(rounded, own, applied.zero_block)


def _merge(followed: Quantized, nearest: Quantized, present: Tensor | None) -> Quantized:
    if present is None:
        return followed
    keep = present.unsqueeze(-1)
    return Quantized(
        torch.where(keep, followed.codes, nearest.codes),
        torch.where(keep, followed.scales, nearest.scales),
        torch.where(present, followed.global_scale, nearest.global_scale),
    )
