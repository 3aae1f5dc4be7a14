"""The constants of the format, and the values that each choice of a recipe may take."""

from __future__ import annotations

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

REFUSED = {
    ("reciprocal", "approx_ftz"): "rcp.approx.ftz is the hardware's own approximation and no other backend can repeat "
    "it; choose exact, and run FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1"
}
"""Choices that exist in the field but cannot be computed alike everywhere, with the reason."""

ROTATIONS = (0, 16, 32, 64, 128)
"""Widths of a Hadamard rotation; 0 is off."""

LAYER_LISTS = ("expert_layers", "kv_layers")
STATIC_SCALES = ("experts_in_global_scale", "experts_mid_global_scale", "k_global_scale", "v_global_scale")
