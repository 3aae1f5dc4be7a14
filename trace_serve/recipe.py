"""The frozen set of every numeric choice under which a policy is served (no torch here).

Two runs whose recipes hash to the same `recipe_id` compute the same codes from the same inputs. The id is stored
wherever a number produced under the recipe is stored, and a mismatch is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_serve.errors import RecipeError

BLOCK = 16
"""Values that share one E4M3 block scale, along the reduction dimension."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9

CHOICES: dict[str, tuple[str, ...]] = {
    "experts": ("w4a4", "w4a16", "bf16"),
    "kv": ("nvfp4", "bf16"),
    "activation_global_scale": ("pow2_per_token",),
    "weight_global_scale": ("pow2_per_expert",),
    "kv_global_scale": ("pow2_static",),
    "scale_formula": ("amax_times_sixth",),
    "reciprocal": ("exact",),
    "ties": ("even",),
    "zero_block": ("zero",),
    "gate_up_scale": ("shared",),
}
"""The values each named choice may take in this version; anything else is refused by name."""

ROTATIONS = (0, 16, 32, 64, 128)


@dataclass(frozen=True)
class Recipe:
    """Numeric choices of one policy.

    Attributes:
        experts: format of routed experts: weights and activations in NVFP4, weights only, or BF16.
        expert_layers: layer indices whose experts follow `experts`; None means every layer.
        kv: format of the attention KV cache.
        kv_layers: layer indices whose KV cache follows `kv`; None means every layer.
        expert_rotation: width of the Hadamard rotation of expert inputs and weights; 0 is off.
        k_rotation: width of the Hadamard rotation of K before it is stored (Q.K is unchanged); 0 is off.
        activation_global_scale: `pow2_per_token`: g = 2^ceil(log2(amax / 2688)), one per token, exact in BF16.
        weight_global_scale: `pow2_per_expert`: the same formula over one expert's matrix.
        kv_global_scale: `pow2_static`: one constant, 2 ** kv_global_scale_log2, for every K and V.
        kv_global_scale_log2: exponent of that constant.
        scale_formula: `amax_times_sixth`: E4M3(amax * (S * fp32(1/6))) with S = 1/g, as in FlashInfer's exact math.
        reciprocal: `exact`: values are multiplied by fp32(1 / (block scale * g)).
        ties: `even`: E2M1 ties go to the even code, as the hardware conversion does.
        zero_block: `zero`: a block whose scale rounds to zero has scale byte 0 and codes 0.
        gate_up_scale: `shared`: gate and up projections share one global scale.
        global_scale_max: largest block scale the global scale aims at.
    """

    experts: str = "w4a4"
    expert_layers: tuple[int, ...] | None = None
    kv: str = "nvfp4"
    kv_layers: tuple[int, ...] | None = None
    expert_rotation: int = 0
    k_rotation: int = 0
    activation_global_scale: str = "pow2_per_token"
    weight_global_scale: str = "pow2_per_expert"
    kv_global_scale: str = "pow2_static"
    kv_global_scale_log2: int = 0
    scale_formula: str = "amax_times_sixth"
    reciprocal: str = "exact"
    ties: str = "even"
    zero_block: str = "zero"
    gate_up_scale: str = "shared"
    global_scale_max: float = E4M3_MAX

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise RecipeError(f"recipe {name}: got {value!r}, expected one of {', '.join(allowed)}", field=name)
        for name in ("expert_rotation", "k_rotation"):
            width = getattr(self, name)
            if isinstance(width, bool) or width not in ROTATIONS:
                raise RecipeError(f"recipe {name}: got {width!r}, expected one of {ROTATIONS}", field=name)
        for name in ("expert_layers", "kv_layers"):
            _check_layers(name, getattr(self, name))
        exponent = self.kv_global_scale_log2
        if isinstance(exponent, bool) or not isinstance(exponent, int) or not -32 <= exponent <= 32:
            raise RecipeError(
                f"recipe kv_global_scale_log2: got {exponent!r}, expected a whole number from -32 to 32",
                field="kv_global_scale_log2",
            )
        if self.global_scale_max != E4M3_MAX:
            raise RecipeError(
                f"recipe global_scale_max: got {self.global_scale_max!r}, expected {E4M3_MAX}", field="global_scale_max"
            )
        if self.experts == "bf16" and (self.expert_rotation or self.expert_layers is not None):
            raise RecipeError(
                "recipe experts: 'bf16' leaves nothing to rotate or to select; "
                "remove expert_rotation and expert_layers, or choose w4a4 or w4a16",
                field="experts",
            )
        if self.kv == "bf16" and (self.k_rotation or self.kv_layers is not None):
            raise RecipeError(
                "recipe kv: 'bf16' leaves nothing to rotate or to select; "
                "remove k_rotation and kv_layers, or choose nvfp4",
                field="kv",
            )

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

    def quantizes_experts(self, layer: int) -> bool:
        return self.experts != "bf16" and (self.expert_layers is None or layer in self.expert_layers)

    def quantizes_kv(self, layer: int) -> bool:
        return self.kv != "bf16" and (self.kv_layers is None or layer in self.kv_layers)

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        for name in ("expert_layers", "kv_layers"):
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
        for name in ("expert_layers", "kv_layers"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


def _check_layers(name: str, layers: object) -> None:
    if layers is None:
        return
    ok = isinstance(layers, tuple) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in layers)
    if not ok or list(layers) != sorted(set(layers)) or not layers:  # type: ignore[call-overload]
        raise RecipeError(
            f"recipe {name}: got {layers!r}, expected null or a sorted list of distinct layer indices", field=name
        )


PRESETS: dict[str, Recipe] = {
    "default": Recipe(),
    "bf16": Recipe(experts="bf16", kv="bf16"),
}
"""Named recipes. `default` is portable: power-of-two global scales, so BF16 holds every NVFP4 value exactly."""


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
