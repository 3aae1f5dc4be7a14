"""The recipe itself: what each choice means, its identity, and what an engine asks of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_serve.errors import RecipeError
from trace_serve.recipe.checks import (
    check_choice,
    check_layers,
    contradictions,
    of_layer,
    powers_of_two,
    static_scales,
)
from trace_serve.recipe.choices import CHOICES, E4M3_MAX, GLOBAL_SCALE_MAXIMA, LAYER_LISTS, ROTATIONS, STATIC_SCALES


@dataclass(frozen=True)
class Recipe:
    """Numeric choices of one policy.

    Below, g is the (decode) global scale, S = 1/g its reciprocal, amax the largest magnitude of what shares a scale,
    and M = 6 * global_scale_max; every operation is fp32, rounded to nearest.

    Attributes:
        experts: format of routed experts: weights and activations in NVFP4, weights only, or BF16.
        expert_layers: layer indices whose experts follow `experts`; None means every layer.
        kv: format of the attention KV cache.
        kv_layers: layer indices whose KV cache follows `kv`; None means every layer.
        expert_rotation: width of the Hadamard rotation of expert inputs and weights; 0 is off.
        k_rotation: width of the Hadamard rotation of K before it is stored (Q.K is unchanged); 0 is off.
        activation_global_scale: `pow2_per_token`: g = 2^ceil(log2(amax / M)), one per token, exact in BF16 ·
            `per_token`: S = min(M / amax, largest fp32) and g = 1/S, as in Transformer Engine's row scaling and in
            FlashInfer's exact math · `per_tensor_static`: the constants of the two fields below, as ModelOpt does.
        experts_in_global_scale: static g of the first product's input: one for every layer, or one a layer.
        experts_mid_global_scale: static g of the second product's input, likewise.
        weight_global_scale: `pow2_per_expert`: g = 2^ceil(log2(amax / M)) over one expert's matrix · `per_expert`:
            g = amax / M, then quantized with S = 1/g and 1/S for g, as SGLang's online NVFP4 loader does; with
            `amax_over_six_g`, which needs no S, with g itself, as ModelOpt does.
        gate_up_scale: gate and up projections share one global scale, or have one each (`split`).
        weight_tiles: weights that share a block scale: 16 along the reduction dimension, or a square of 16 x 16.
        kv_global_scale: `pow2_static`: one constant, 2 ** kv_global_scale_log2, for every K and V · `static`: the
            constants of `k_global_scale` and `v_global_scale`.
        kv_global_scale_log2: exponent of that constant.
        k_global_scale: static g of K: one for every layer, or one a layer.
        v_global_scale: static g of V, likewise.
        scale_formula: E4M3 block scale of activations: `amax_times_sixth`: amax * (S * (1/6)), Transformer Engine and
            FlashInfer's exact math · `amax_over_six`: (amax / 6) * S · `s_times_amax_sixth`: S * (amax * (1/6)), vLLM's
            reference · `amax_over_six_g`: amax / (6 * g), ModelOpt.
        weight_scale_formula: the same for weights.
        kv_scale_formula: the same for K and V.
        reciprocal: `exact`: values are multiplied by 1 / (block scale * g) · `divide`: divided by block scale * g.
        ties: E2M1 ties go to the `even` code, as the hardware conversion does, or `up` to the larger magnitude.
        zero_block: what a block whose scale rounds to zero gets: `zero`: scale byte 0 and codes 0 · `min_subnormal`:
            scale 2^-9 · `one`: scale 1.0 if it was zero before rounding too, else 2^-9, as ModelOpt · `saturate`: scale
            byte 0 and codes of x * largest fp32, as FlashInfer's kernels leave them (they read back as zero, but have
            hint bits).
        global_scale_max: largest block scale the global scales of activations and weights aim at: 448, or 256.
        four_over_six: whether `weights`, or weights and activations (`experts`), choose per block between the scale s
            that maps the maximum to 6 and 1.5 * s, which maps it to 4: the one with the smaller sum over the block, in
            order, of (code * block scale - value * S)^2; s on equality, as FlashInfer's MSE mode.
    """

    experts: str = "w4a4"
    expert_layers: tuple[int, ...] | None = None
    kv: str = "nvfp4"
    kv_layers: tuple[int, ...] | None = None
    expert_rotation: int = 0
    k_rotation: int = 0
    activation_global_scale: str = "pow2_per_token"
    experts_in_global_scale: tuple[float, ...] | None = None
    experts_mid_global_scale: tuple[float, ...] | None = None
    weight_global_scale: str = "pow2_per_expert"
    gate_up_scale: str = "shared"
    weight_tiles: str = "1x16"
    kv_global_scale: str = "pow2_static"
    kv_global_scale_log2: int = 0
    k_global_scale: tuple[float, ...] | None = None
    v_global_scale: tuple[float, ...] | None = None
    scale_formula: str = "amax_times_sixth"
    weight_scale_formula: str = "amax_times_sixth"
    kv_scale_formula: str = "amax_times_sixth"
    reciprocal: str = "exact"
    ties: str = "even"
    zero_block: str = "zero"
    global_scale_max: float = E4M3_MAX
    four_over_six: str = "off"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name in ("expert_rotation", "k_rotation"):
            width = getattr(self, name)
            if isinstance(width, bool) or width not in ROTATIONS:
                raise RecipeError(f"recipe {name}: got {width!r}, expected one of {ROTATIONS}", field=name)
        for name in LAYER_LISTS:
            check_layers(name, getattr(self, name))
        for name in STATIC_SCALES:
            object.__setattr__(self, name, static_scales(name, getattr(self, name)))
        exponent = self.kv_global_scale_log2
        if isinstance(exponent, bool) or not isinstance(exponent, int) or not -32 <= exponent <= 32:
            raise RecipeError(
                f"recipe kv_global_scale_log2: got {exponent!r}, expected a whole number from -32 to 32",
                field="kv_global_scale_log2",
            )
        if isinstance(self.global_scale_max, bool) or self.global_scale_max not in GLOBAL_SCALE_MAXIMA:
            raise RecipeError(
                f"recipe global_scale_max: got {self.global_scale_max!r}, expected one of {GLOBAL_SCALE_MAXIMA}",
                field="global_scale_max",
            )
        # 256 and 256.0 are one choice and must have one id.
        object.__setattr__(self, "global_scale_max", float(self.global_scale_max))
        for field, contradiction in contradictions(self):
            raise RecipeError(f"recipe {field}: {contradiction}", field=field)

    @property
    def recipe_id(self) -> str:
        """`sha256:` and the hex digest of the canonical JSON of every choice."""
        return "sha256:" + hashlib.sha256(self.canonical_json().encode()).hexdigest()

    @property
    def is_bf16(self) -> bool:
        return self.experts == "bf16" and self.kv == "bf16"

    @property
    def has_hints(self) -> bool:
        """Whether anything is rounded while serving, so that there is an outcome to export."""
        return self.experts == "w4a4" or self.kv == "nvfp4"

    @property
    def exact_in_bf16(self) -> bool:
        """Whether BF16 holds every dequantized value exactly, because every global scale is a power of two.

        An engine that multiplies BF16 images of NVFP4 operands computes the NVFP4 product only if this holds.
        """
        activations = self.experts != "w4a4" or self.activation_global_scale == "pow2_per_token"
        if self.activation_global_scale == "per_tensor_static":
            activations = powers_of_two(self.experts_in_global_scale, self.experts_mid_global_scale)
        weights = self.experts == "bf16" or self.weight_global_scale == "pow2_per_expert"
        kv = self.kv == "bf16" or self.kv_global_scale == "pow2_static"
        return activations and weights and (kv or powers_of_two(self.k_global_scale, self.v_global_scale))

    def experts_in_scale(self, layer: int) -> float | None:
        """Static g of the first product's input in a layer; None where g is taken from each token."""
        return of_layer("experts_in_global_scale", self.experts_in_global_scale, layer)

    def experts_mid_scale(self, layer: int) -> float | None:
        """Static g of the second product's input in a layer; None where g is taken from each token."""
        return of_layer("experts_mid_global_scale", self.experts_mid_global_scale, layer)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Static g of K and of V in a layer."""
        k = of_layer("k_global_scale", self.k_global_scale, layer)
        v = of_layer("v_global_scale", self.v_global_scale, layer)
        power = float(2.0**self.kv_global_scale_log2)
        return (power if k is None else k), (power if v is None else v)

    def quantizes_experts(self, layer: int) -> bool:
        return self.experts != "bf16" and (self.expert_layers is None or layer in self.expert_layers)

    def quantizes_kv(self, layer: int) -> bool:
        return self.kv != "bf16" and (self.kv_layers is None or layer in self.kv_layers)

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        for name in (*LAYER_LISTS, *STATIC_SCALES):
            if out[name] is not None:
                out[name] = list(out[name])
        return out

    def canonical_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Recipe:
        """Builds a recipe from parsed JSON.

        Raises:
            RecipeError: an unknown key, an unknown value, or choices that contradict each other.
        """
        if not isinstance(raw, Mapping):
            raise RecipeError(f"recipe: got {type(raw).__name__}, expected an object", field="recipe")
        known = {f.name for f in dataclasses.fields(cls)}
        for key in raw:
            if key not in known:
                expected = ", ".join(sorted(known))
                raise RecipeError(f"recipe {key}: unknown choice, expected one of {expected}", field=key)
        values = dict(raw)
        for name in (*LAYER_LISTS, *STATIC_SCALES):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)
