"""Small hint files with every feature of the format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trace_serve.hints import wire

RECIPE_ID = "sha256:" + "ab" * 32


def make_site(name: str, rows: int, layers: tuple[int, ...], blocks: int, seed: int, **changes: Any) -> wire.Site:
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "name": name,
        "layers": layers,
        "bits": rng.integers(0, 1 << 16, (rows, len(layers), blocks), dtype=np.uint16),
        "scales": rng.integers(0, 127, (rows, len(layers), blocks), dtype=np.uint8),
        "present": rng.random(rows) < 0.8,
    }
    return wire.Site(**{**fields, **changes})


def with_codes(site: wire.Site, seed: int = 5) -> wire.Site:
    """The site with whole codes, and the bits that they end in."""
    codes = np.random.default_rng(seed).integers(0, 256, (*site.bits.shape[:2], site.values // 2), dtype=np.uint8)
    odd = np.stack((codes & 1, codes >> 4 & 1), axis=-1).reshape(*site.bits.shape, 16)
    bits = np.packbits(odd, axis=-1, bitorder="little").view("<u2")[..., 0]
    return replace(site, codes=codes, bits=bits)


def make_file(rows: int = 11, **changes: Any) -> wire.HintFile:
    rng = np.random.default_rng(rows)
    log2 = rng.integers(-20, 20, (rows, 3, 1), dtype=np.int8)
    logprobs = -rng.random(rows).astype(np.float32)
    logprobs[: rows // 2] = np.nan
    fields: dict[str, Any] = {
        "token_ids": rng.integers(0, 49152, rows, dtype=np.int32),
        "sites": (
            make_site("experts_in", rows, (0, 1, 5), 36, 1, global_log2=log2),
            make_site("k", rows, (0, 5), 4, 2),
            with_codes(make_site("v", rows, (0, 5), 4, 3)),
            make_site(
                "experts_mid", rows, (1, 5), 6, 4, groups=2, global_scale=rng.random((rows, 2, 2), dtype=np.float32)
            ),
        ),
        "recipe_id": RECIPE_ID,
        "model_digest": "sha256:" + "cd" * 32,
        "weight_versions": ((0, rows // 2, "7"), (rows // 2, rows, "8")),
        "first_token": 2,
        "logprobs": logprobs,
        "routed_experts": rng.integers(0, 4, (rows, 6, 2), dtype=np.int32),
        "routed_present": rng.random(rows) < 0.9,
        "next_token_id": 42,
    }
    return wire.HintFile(**{**fields, **changes})


def same(a: wire.HintFile, b: wire.HintFile) -> bool:
    """Equal contents; what lies under a missing row does not count."""
    plain = ("recipe_id", "model_digest", "weight_versions", "first_token", "next_token_id")
    if any(getattr(a, key) != getattr(b, key) for key in plain) or not np.array_equal(a.token_ids, b.token_ids):
        return False
    if (a.logprobs is None) != (b.logprobs is None) or (a.routed_experts is None) != (b.routed_experts is None):
        return False
    if a.logprobs is not None and not np.array_equal(a.logprobs, b.logprobs, equal_nan=True):
        return False
    if a.routed_experts is not None:
        everywhere = np.ones(a.rows, dtype=bool)
        mask_a, mask_b = (everywhere if f.routed_present is None else f.routed_present for f in (a, b))
        if not np.array_equal(mask_a, mask_b):
            return False
        if not np.array_equal(a.routed_experts[mask_a], b.routed_experts[mask_b]):
            return False
    if {site.name for site in a.sites} != {site.name for site in b.sites}:
        return False
    return all(same_site(site, b.site(site.name)) for site in a.sites)


def same_site(a: wire.Site, b: wire.Site) -> bool:
    if a.layers != b.layers or not np.array_equal(a.present, b.present):
        return False
    if (a.groups, a.global_kind) != (b.groups, b.global_kind):
        return False
    for x, y in ((a.global_log2, b.global_log2), (a.global_scale, b.global_scale)):
        if x is not None and y is not None and not np.array_equal(x[a.present], y[b.present]):
            return False
    if a.code_kind != b.code_kind or not np.array_equal(a.bits[a.present], b.bits[b.present]):
        return False
    if a.codes is not None and b.codes is not None and not np.array_equal(a.codes[a.present], b.codes[b.present]):
        return False
    if a.scales is None or b.scales is None:
        return True
    mask = 1 if "lsb" in (a.scale_kind, b.scale_kind) else 0xFF
    return np.array_equal(a.scales[a.present] & mask, b.scales[b.present] & mask)
