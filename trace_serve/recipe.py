"""The frozen set of every numeric choice under which a policy is served (no torch here).

Two runs whose recipes hash to the same `recipe_id` compute the same codes from the same inputs. The id is stored
wherever a number produced under the recipe is stored, and a mismatch is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_serve.errors import RecipeError

BLOCK = 16
"""Values that share one E4M3 block scale, along the reduction dimension."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9

SCALE_FORMULAS = ("amax_times_sixth", "amax_over_six", "s_times_amax_sixth", "amax_over_six_g")

CHOICES: dict[str, tuple[str, ...]] = {
    "experts": ("w4a4", "w4a16", "bf16"),
    "kv": ("nvfp4", "bf16"),
    "activation_global_scale": ("pow2_per_token", "per_token", "per_tensor_static"),
    "weight_global_scale": ("pow2_per_expert", "per_expert"),
    "kv_global_scale": ("pow2_static", "static"),
    "scale_formula": SCALE_FORMULAS,
    "weight_scale_formula": SCALE_FORMULAS,
    "kv_scale_formula": SCALE_FORMULAS,
    "reciprocal": ("exact", "divide"),
    "ties": ("even", "up"),
    "zero_block": ("zero", "one", "min_subnormal", "saturate"),
    "gate_up_scale": ("shared", "split"),
    "weight_tiles": ("1x16", "16x16"),
    "four_over_six": ("off", "weights", "experts"),
}
"""The values each named choice may take; anything else is refused by name."""

GLOBAL_SCALE_MAXIMA = (E4M3_MAX, 256.0)

_REFUSED = {
    ("reciprocal", "approx_ftz"): "rcp.approx.ftz is the hardware's own approximation and no other backend can repeat "
    "it; choose exact, and run FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1"
}
"""Choices that exist in the field but cannot be computed alike everywhere, with the reason."""

ROTATIONS = (0, 16, 32, 64, 128)
_LAYERS = ("expert_layers", "kv_layers")
_STATIC_SCALES = ("experts_in_global_scale", "experts_mid_global_scale", "k_global_scale", "v_global_scale")


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
            _check_choice(name, getattr(self, name), allowed)
        for name in ("expert_rotation", "k_rotation"):
            width = getattr(self, name)
            if isinstance(width, bool) or width not in ROTATIONS:
                raise RecipeError(f"recipe {name}: got {width!r}, expected one of {ROTATIONS}", field=name)
        for name in _LAYERS:
            _check_layers(name, getattr(self, name))
        for name in _STATIC_SCALES:
            object.__setattr__(self, name, _static_scales(name, getattr(self, name)))
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
        for field, contradiction in self._contradictions():
            raise RecipeError(f"recipe {field}: {contradiction}", field=field)

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.experts == "bf16" and (self.expert_rotation or self.expert_layers is not None):
            yield (
                "experts",
                "'bf16' leaves nothing to rotate or to select; remove expert_rotation and expert_layers, "
                "or choose w4a4 or w4a16",
            )
        if self.kv == "bf16" and (self.k_rotation or self.kv_layers is not None):
            yield (
                "kv",
                "'bf16' leaves nothing to rotate or to select; remove k_rotation and kv_layers, or choose nvfp4",
            )
        for mode, static, active, names in (
            ("activation_global_scale", "per_tensor_static", self.experts == "w4a4", _STATIC_SCALES[:2]),
            ("kv_global_scale", "static", self.kv == "nvfp4", _STATIC_SCALES[2:]),
        ):
            wanted = active and getattr(self, mode) == static
            for name in names:
                if wanted and getattr(self, name) is None:
                    yield name, f"{mode} {static!r} needs it; give one positive number, or one a layer"
                if not wanted and getattr(self, name) is not None:
                    yield name, f"is used only with {mode} {static!r} of a quantized format; remove it"
        if self.kv_global_scale == "static" and self.kv_global_scale_log2:
            yield "kv_global_scale_log2", "is used only with kv_global_scale 'pow2_static'; remove it"
        if self.global_scale_max != E4M3_MAX and self.four_over_six == "off":
            yield (
                "global_scale_max",
                "256 leaves room for the larger scale of 4over6; choose four_over_six, or keep 448",
            )
        if self.four_over_six != "off" and self.experts == "bf16":
            yield "four_over_six", "there are no quantized experts to choose scales for; choose off, w4a4 or w4a16"
        if self.four_over_six == "experts" and self.experts != "w4a4":
            yield "four_over_six", "activations are not quantized; choose weights, or experts 'w4a4'"
        if self.zero_block == "saturate" and self.reciprocal == "divide":
            yield "zero_block", "'saturate' is defined by a reciprocal; choose another, or reciprocal 'exact'"
        if self.weight_tiles != "1x16" and self.experts == "bf16":
            yield "weight_tiles", "there are no quantized weights; choose 1x16, w4a4 or w4a16"
        if self.weight_tiles != "1x16" and self.four_over_six != "off":
            yield "weight_tiles", "4over6 chooses per 1x16 block; choose 1x16, or four_over_six 'off'"

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
            activations = _powers_of_two(self.experts_in_global_scale, self.experts_mid_global_scale)
        weights = self.experts == "bf16" or self.weight_global_scale == "pow2_per_expert"
        kv = self.kv == "bf16" or self.kv_global_scale == "pow2_static"
        return activations and weights and (kv or _powers_of_two(self.k_global_scale, self.v_global_scale))

    def experts_in_scale(self, layer: int) -> float | None:
        """Static g of the first product's input in a layer; None where g is taken from each token."""
        return _of_layer("experts_in_global_scale", self.experts_in_global_scale, layer)

    def experts_mid_scale(self, layer: int) -> float | None:
        """Static g of the second product's input in a layer; None where g is taken from each token."""
        return _of_layer("experts_mid_global_scale", self.experts_mid_global_scale, layer)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Static g of K and of V in a layer."""
        k = _of_layer("k_global_scale", self.k_global_scale, layer)
        v = _of_layer("v_global_scale", self.v_global_scale, layer)
        power = float(2.0**self.kv_global_scale_log2)
        return (power if k is None else k), (power if v is None else v)

    def quantizes_experts(self, layer: int) -> bool:
        return self.experts != "bf16" and (self.expert_layers is None or layer in self.expert_layers)

    def quantizes_kv(self, layer: int) -> bool:
        return self.kv != "bf16" and (self.kv_layers is None or layer in self.kv_layers)

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        for name in (*_LAYERS, *_STATIC_SCALES):
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
        for name in (*_LAYERS, *_STATIC_SCALES):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    reason = _REFUSED.get((name, value)) if isinstance(value, str) else None
    if reason is not None:
        raise RecipeError(f"recipe {name}: {value!r} is refused: {reason}", field=name)
    raise RecipeError(f"recipe {name}: got {value!r}, expected one of {', '.join(allowed)}", field=name)


def _static_scales(name: str, scales: object) -> tuple[float, ...] | None:
    if scales is None:
        return None
    ok = isinstance(scales, tuple) and all(
        isinstance(g, int | float) and not isinstance(g, bool) and 2.0**-100 <= g <= 2.0**100 for g in scales
    )
    if not isinstance(scales, tuple) or not ok or not scales:
        raise RecipeError(
            f"recipe {name}: got {scales!r}, expected null or a list of positive numbers, one or one a layer",
            field=name,
        )
    return tuple(float(g) for g in scales)


def _of_layer(name: str, scales: tuple[float, ...] | None, layer: int) -> float | None:
    if scales is None or len(scales) == 1:
        return None if scales is None else scales[0]
    if not 0 <= layer < len(scales):
        raise RecipeError(
            f"recipe {name}: has {len(scales)} scales, layer {layer} needs one; give one a layer", field=name
        )
    return scales[layer]


def _powers_of_two(*scales: tuple[float, ...] | None) -> bool:
    return all(math.frexp(g)[0] == 0.5 for group in scales if group is not None for g in group)


def _check_layers(name: str, layers: object) -> None:
    if layers is None:
        return
    ok = isinstance(layers, tuple) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in layers)
    if not ok or list(layers) != sorted(set(layers)) or not layers:  # type: ignore[call-overload]
        raise RecipeError(
            f"recipe {name}: got {layers!r}, expected null or a sorted list of distinct layer indices", field=name
        )


PORTABLE = Recipe()

PRESETS: dict[str, Recipe] = {
    "default": PORTABLE,
    "portable": PORTABLE,
    "bf16": Recipe(experts="bf16", kv="bf16"),
    "gb200": Recipe(
        activation_global_scale="per_token",
        weight_global_scale="per_expert",
        weight_scale_formula="amax_over_six",
        four_over_six="weights",
        kv_scale_formula="s_times_amax_sixth",
        zero_block="saturate",
    ),
    "paper": Recipe(activation_global_scale="per_token", weight_global_scale="per_expert"),
}
"""Named recipes.

- `default` is `portable`: power-of-two global scales, so BF16 holds every NVFP4 value exactly.
- `gb200`: what SGLang 0.5.23 with `nvfp4_online` and FlashInfer 0.7.2 computes under exact math: per-token FP32 scales,
  weights with 4over6 (448, squared error). FlashInfer's KV quantizer has no exact mode; this is its formula, exact.
- `paper`: TRACE (arXiv 2610.07767); where it is silent, Transformer Engine's row-scaled 1x16 recipe.
"""


def load_recipe(spec: str) -> Recipe:
    """A preset's name, or the path of a JSON file with a recipe object.

    Raises:
        RecipeError: neither a preset nor a readable file, or a bad recipe.
    """
    if spec in PRESETS:
        return PRESETS[spec]
    try:
        raw = json.loads(Path(spec).read_text(encoding="utf-8"))
    except OSError as exc:
        raise RecipeError(
            f"recipe {spec!r}: not a preset ({', '.join(PRESETS)}) and not a readable file ({exc.strerror})",
            field="recipe",
        ) from exc
    except ValueError as exc:
        raise RecipeError(f"recipe {spec!r}: not JSON: {exc}", field="recipe") from exc
    return Recipe.from_dict(raw)
