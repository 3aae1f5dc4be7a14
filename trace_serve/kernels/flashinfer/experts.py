"""Routed experts on FlashInfer's CuTe DSL kernels, fed with rows that our quantizers rounded.

Two runners:

- `cute_dsl_staged` (`StagedExperts`) calls the library's own stages one by one and quantizes the input of the second
  product with the recipe's quantizer in between. Any recipe with a shared gate and up scale runs, and the outcome at
  `experts_mid` is there. It is the one that `auto` chooses.
- `cute_dsl_fused` (`FusedExperts`) is one call, in which the library quantizes that input itself: only for recipes that
  name exactly what it computes, and without an outcome at `experts_mid`.

`trtllm_fp4_block_scale_routed_moe` is not used: it hides the same outcome, in precompiled kernels whose rounding cannot
be read. Sums over experts are deterministic: the atomic finalize of these kernels is switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trace_serve.errors import ConfigError, EngineError, RecipeError, ShapeError
from trace_serve.kernels.flashinfer import contract, environment
from trace_serve.kernels.flashinfer.availability import reason
from trace_serve.kernels.flashinfer.weights import TILE, ExpertWeights, mma_scales
from trace_serve.kernels.for_recipe import RecipeKernels
from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import BLOCK, E2M1_MAX, E4M3_MAX, Recipe

SWIGLU = 3
"""`flashinfer.tllm_enums.ActivationType.Swiglu`."""
_PRODUCT: dict[str, Any] = {
    "a_dtype": "float4_e2m1fn",
    "b_dtype": "float4_e2m1fn",
    "sf_dtype": "float8_e4m3fn",
    "sf_vec_size": BLOCK,
    "mma_tiler_mn": (TILE, TILE),
    "cluster_shape_mn": (1, 1),
    "enable_pdl": False,
}
_TACTIC = (TILE, ((TILE, TILE), (1, 1), False), ((TILE, TILE), (1, 1), False))
"""The smallest tiles, for every shape: a tuned choice could differ between two starts of an engine."""


@dataclass(frozen=True)
class ExpertMid:
    """What was rounded at `experts_mid`: row p belongs to entry p of the flattened `topk_ids`.

    Attributes:
        quantized: codes [P, I/2], scales [P, I/16], global_scale [P] and, if asked for, hints [P, I/16].
        present: bool [P]; False where the expert is not on this rank, and the row is zeros that mean nothing.
    """

    quantized: Quantized
    present: Tensor


@dataclass(frozen=True)
class Stages:
    """The library's functions that `StagedExperts` calls."""

    sort: Callable[..., Any] = contract.MOE_SORT
    gemm1: Callable[..., Any] = contract.GEMM1
    gemm2: Callable[..., Any] = contract.GEMM2
    unpermute: Callable[..., Any] = contract.UNPERMUTE


class _Experts:
    """What both runners share: the layer's weights, its experts' place among all, and the checks of the arguments."""

    def __init__(
        self, weights: ExpertWeights, kernels: RecipeKernels, *, experts: int | None = None, first_expert: int = 0
    ) -> None:
        self.weights = weights
        self.recipe = kernels.recipe
        self._kernels = kernels
        self._experts = weights.experts if experts is None else experts
        self._first = first_expert
        if not 0 <= first_expert <= self._experts - weights.experts:
            raise ShapeError(
                f"first_expert: got {first_expert} for {weights.experts} experts of {self._experts}, expected 0 to "
                f"{self._experts - weights.experts}",
                field="first_expert",
            )
        if self.recipe.experts != "w4a4":
            raise RecipeError(
                f"recipe experts: {self.recipe.experts!r} cannot run here, whose activations are NVFP4; choose w4a4",
                field="experts",
            )

    def _checked(self, x: Quantized, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        rows, device = x.codes.shape[0], self.weights.device
        hidden = self.weights.hidden
        shapes = (tuple(x.codes.shape), tuple(x.scales.shape), tuple(x.global_scale.shape))
        expected = ((rows, hidden // 2), (rows, hidden // BLOCK), (rows,))
        if shapes != expected or x.codes.device != device or x.global_scale.dtype != torch.float32:
            raise ShapeError(
                f"x: got codes, scales and global_scale {shapes} on {x.codes.device}, expected {expected} on {device}, "
                "global_scale in float32",
                field="x",
            )
        for name, tensor, dtypes in (
            ("topk_ids", topk_ids, (torch.int32, torch.int64)),
            ("topk_weights", topk_weights, (torch.float32, torch.bfloat16, torch.float16)),
        ):
            good = tensor.dim() == 2 and tensor.shape == topk_ids.shape and tensor.shape[0] == rows
            if not good or tensor.shape[1] == 0 or tensor.dtype not in dtypes or tensor.device != device:
                raise ShapeError(
                    f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected "
                    f"{' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} [{rows}, top_k] on {device}",
                    field=name,
                )
        return topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()

    def _padded_input(self, x: Quantized) -> tuple[Tensor, Tensor]:
        """Codes, and scales in row order: the gathering product reads them as they are, not in tiles."""
        more = self.weights.hidden_padded - self.weights.hidden
        codes = pad(x.codes, (0, more // 2)).contiguous()
        return codes, pad(x.scales, (0, more // BLOCK)).contiguous().view(torch.float8_e4m3fn)

    def _local(self) -> dict[str, int]:
        return {
            "num_experts": self._experts,
            "num_local_experts": self.weights.experts,
            "local_expert_offset": self._first,
        }


class StagedExperts(_Experts):
    """The first product with SiLU, our quantizer, the second product, and a sum over experts in the order of top-k.

    Args:
        weights: from `prepare_weights`.
        kernels: quantizers of the recipe on the same device.
        experts: experts of the layer on all ranks; None if all are here.
        first_expert: index of the first expert that is here.
        stages: the library's functions.

    Raises:
        ShapeError: `first_expert` out of range.
        RecipeError: a recipe whose activations are not NVFP4.
    """

    name = "cute_dsl_staged"
    sites = ("experts_in", "experts_mid")

    def __init__(
        self,
        weights: ExpertWeights,
        kernels: RecipeKernels,
        *,
        experts: int | None = None,
        first_expert: int = 0,
        stages: Stages | None = None,
    ) -> None:
        super().__init__(weights, kernels, experts=experts, first_expert=first_expert)
        self._stages = stages or Stages()

    def __call__(
        self,
        x: Quantized,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        mid_static_scale: float | None = None,
        hints: bool = False,
        counters: Tensor | None = None,
    ) -> tuple[Tensor, ExpertMid]:
        """Runs the experts.

        Args:
            x: rows [T, H] quantized (and rotated) by `kernels.quantize_activations`, scales in row order.
            topk_ids: int32 or int64 [T, top_k].
            topk_weights: float [T, top_k].
            mid_static_scale: `recipe.experts_mid_scale(layer)`.
            hints: whether `ExpertMid` carries hint bits.
            counters: int64 [3], incidents of the second quantization are added in place.

        Returns:
            bfloat16 [T, H], and the outcome at `experts_mid`.

        Raises:
            ShapeError: an argument of the wrong shape, dtype or device.
            RecipeError: `mid_static_scale` is missing, or the recipe has none.
            EngineError: the installed FlashInfer is another one.
        """
        ids, scores = self._checked(x, topk_ids, topk_weights)
        tokens, top_k = ids.shape
        weights = self.weights
        if tokens == 0:
            nothing = torch.empty((0, weights.intermediate), dtype=torch.bfloat16, device=weights.device)
            mid = self._quantized(nothing, mid_static_scale, hints, counters)
            out = torch.empty((0, weights.hidden), dtype=torch.bfloat16, device=weights.device)
            return out, ExpertMid(mid, torch.empty(0, dtype=torch.bool, device=weights.device))
        tile_experts, tile_limits, to_permuted, to_pair, _, tile_count = self._stages.sort(
            token_selected_experts=ids,
            token_final_scales=scores,
            top_k=top_k,
            tile_tokens_dim=TILE,
            enable_pdl=False,
            **self._local(),
        )
        codes, scales = self._padded_input(x)
        middle, _ = self._stages.gemm1(
            a=codes,
            b=weights.w13,
            a_scale=scales,
            b_scale=weights.w13_scales,
            alpha=weights.w13_global,
            tile_idx_to_expert_idx=tile_experts,
            tile_idx_to_mn_limit=tile_limits,
            token_id_mapping=to_pair,
            num_non_exiting_tiles=tile_count,
            a_per_token_scale=x.global_scale.contiguous(),
            topk=top_k,
            c_dtype="bfloat16",
            quantize_output=False,
            activation_type=SWIGLU,
            gated=True,
            **_PRODUCT,
        )
        place = to_permuted.reshape(-1).to(torch.int64)
        present = place >= 0
        # Rows between the pairs are whatever was in memory: only rows of pairs are read, and never counted otherwise.
        rows = middle[place.clamp(min=0), : weights.intermediate].masked_fill(~present.unsqueeze(-1), 0)
        mid = self._quantized(rows, mid_static_scale, hints, counters)
        mid_codes, mid_scales, mid_global = _permuted(mid, place, middle.shape[0], weights.intermediate_padded)
        products = self._stages.gemm2(
            a=mid_codes,
            b=weights.w2,
            a_scale=mma_scales(mid_scales.unsqueeze(0)),
            b_scale=weights.w2_scales,
            alpha=weights.w2_global,
            tile_idx_to_expert_idx=tile_experts,
            num_non_exiting_tiles=tile_count,
            tile_idx_to_mn_limit=tile_limits,
            permuted_idx_to_expanded_idx=to_pair,
            token_final_scales=scores,
            out=torch.empty((tokens * top_k, weights.hidden_padded), dtype=torch.bfloat16, device=weights.device),
            a_per_token_scale=mid_global,
            out_dtype="bfloat16",
            use_fused_finalize=False,
            **_PRODUCT,
        )
        out = torch.empty((tokens, weights.hidden_padded), dtype=torch.bfloat16, device=weights.device)
        self._stages.unpermute(
            permuted_input=products,
            output=out,
            expanded_idx_to_permuted_idx=to_permuted,
            topk_scales=scores,
            num_tokens=tokens,
            top_k=top_k,
            enable_pdl=False,
            input_is_expanded=True,
        )
        return out[:, : weights.hidden].contiguous(), ExpertMid(mid, present)

    def _quantized(self, rows: Tensor, static_scale: float | None, hints: bool, counters: Tensor | None) -> Quantized:
        return self._kernels.quantize_activations(rows, static_scale=static_scale, hints=hints, counters=counters)


class FusedExperts(_Experts):
    """The library's single call, which quantizes the input of the second product itself.

    Args:
        weights, kernels, experts, first_expert: as `StagedExperts`.

    Raises:
        ShapeError, RecipeError: as `StagedExperts`; RecipeError too if the recipe names another quantization of the
            second input than the library's.
        ConfigError: FlashInfer's quantizer is not in exact math.
    """

    name = "cute_dsl_fused"
    sites = ("experts_in",)

    def __init__(
        self, weights: ExpertWeights, kernels: RecipeKernels, *, experts: int | None = None, first_expert: int = 0
    ) -> None:
        super().__init__(weights, kernels, experts=experts, first_expert=first_expert)
        for field, wanted in LIBRARY_CHOICES.items():
            got = getattr(self.recipe, field)
            if got not in wanted:
                raise RecipeError(
                    f"recipe {field}: {got!r}, but runner {self.name!r} quantizes the second product's input with "
                    f"{' or '.join(repr(value) for value in wanted)}; choose runner {StagedExperts.name!r}",
                    field=field,
                )
        environment.require_exact_math()
        # The factor that makes a token's largest block scale 448, as the quantizer inside wants it.
        smallest = torch.tensor(1.0 / (E2M1_MAX * E4M3_MAX), dtype=torch.float32)
        self._mid_factor = smallest.reshape(1).to(weights.device)

    def __call__(
        self, x: Quantized, topk_ids: Tensor, topk_weights: Tensor, *, want_mid: bool = False
    ) -> tuple[Tensor, None]:
        """Runs the experts; arguments as in `StagedExperts`.

        Raises:
            ShapeError: an argument of the wrong shape, dtype or device.
            EngineError: `want_mid`, or the installed FlashInfer is another one.
        """
        if want_mid:
            raise EngineError(
                f"experts_mid: not available with runner {self.name!r}, which rounds it inside one call; choose runner "
                f"{StagedExperts.name!r}, or hints at experts_in alone"
            )
        ids, scores = self._checked(x, topk_ids, topk_weights)
        weights = self.weights
        if ids.shape[0] == 0:
            return torch.empty((0, weights.hidden), dtype=torch.bfloat16, device=weights.device), None
        codes, scales = self._padded_input(x)
        out: Tensor = contract.FUSED_MOE(
            x=codes,
            x_sf=scales,
            token_selected_experts=ids,
            token_final_scales=scores,
            w1_weight=weights.w13,
            w1_weight_sf=weights.w13_scales,
            w1_alpha=weights.w13_global,
            fc2_input_scale=self._mid_factor,
            w2_weight=weights.w2,
            w2_weight_sf=weights.w2_scales,
            w2_alpha=weights.w2_global,
            top_k=ids.shape[1],
            output_dtype=torch.bfloat16,
            use_fused_finalize=False,
            activation_type=SWIGLU,
            quant_mode="w4a4",
            per_token_scale=x.global_scale.contiguous(),
            tactic=_TACTIC,
            **self._local(),
        )
        return out[:, : weights.hidden].contiguous(), None


LIBRARY_CHOICES: dict[str, tuple[Any, ...]] = {
    "activation_global_scale": ("per_token",),
    "scale_formula": ("amax_times_sixth",),
    "reciprocal": ("exact",),
    "ties": ("even",),
    "zero_block": ("saturate",),
    "global_scale_max": (E4M3_MAX,),
    "four_over_six": ("off", "weights"),
    "expert_rotation": (0,),
}
"""What FlashInfer's own per-token quantizer computes under exact math, by field of the recipe."""

RUNNERS: dict[str, type[StagedExperts] | type[FusedExperts]] = {
    runner.name: runner for runner in (StagedExperts, FusedExperts)
}


def fused_fits(recipe: Recipe) -> bool:
    """Whether `FusedExperts` computes what the recipe says."""
    return all(getattr(recipe, field) in wanted for field, wanted in LIBRARY_CHOICES.items())


def experts_for(
    weights: ExpertWeights,
    kernels: RecipeKernels,
    *,
    runner: str = "auto",
    experts: int | None = None,
    first_expert: int = 0,
) -> StagedExperts | FusedExperts:
    """The runner of one layer, once everything that it needs is there.

    Args:
        weights, kernels, experts, first_expert: as `StagedExperts`.
        runner: a name of `RUNNERS`; `auto` is `cute_dsl_staged`.

    Raises:
        ConfigError: unknown runner, the weights' device cannot run FlashInfer, or its math is not exact.
        RecipeError: a recipe that the runner cannot compute.
    """
    name = StagedExperts.name if runner == "auto" else runner
    if name not in RUNNERS:
        raise ConfigError(f"runner: got {runner!r}, expected auto or one of {', '.join(RUNNERS)}", field="runner")
    why = reason(weights.device)
    if why:
        raise ConfigError(f"kernels: backend 'flashinfer' cannot run on {weights.device}: {why}", field="kernels")
    return RUNNERS[name](weights, kernels, experts=experts, first_expert=first_expert)


def _permuted(mid: Quantized, place: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of pairs at their place among `rows` padded ones; the others are zeros. K is padded to `k` with zeros."""
    # Pairs of other ranks go to one row more, which is cut off again.
    target = torch.where(place >= 0, place, rows)
    device, more = place.device, k - mid.codes.shape[1] * 2
    codes = torch.zeros((rows + 1, k // 2), dtype=torch.uint8, device=device)
    scales = torch.zeros((rows + 1, k // BLOCK), dtype=torch.uint8, device=device)
    g = torch.zeros(rows + 1, dtype=torch.float32, device=device)
    codes.index_copy_(0, target, pad(mid.codes, (0, more // 2)))
    scales.index_copy_(0, target, pad(mid.scales, (0, more // BLOCK)))
    g.index_copy_(0, target, mid.global_scale)
    return codes[:-1], scales[:-1], g[:-1]
