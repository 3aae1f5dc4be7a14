"""Writing wire format version 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.rows import SCALE_KINDS, HintFile, Site
from trace_serve.hints.schema import BIT_ORDER, FORMAT, POISON, POISON_LOG2, SCHEMA_VERSION, token_ids_digest


def to_bytes(hints: HintFile, *, scale: str = "lsb") -> bytes:
    """The file as bytes; the same contents always give the same bytes.

    Args:
        hints: what to write; a site that holds only lowest bits of scales cannot be written with their bytes. Whole
            codes are written where a site has them.
        scale: `lsb` keeps the lowest bit of each scale byte, `byte` the whole byte, `none` neither.

    Raises:
        HintFormatError: an unknown `scale`, or one that the site does not have.
    """
    return container.encode(tensors_of(hints, scale), metadata_of(hints, scale))


def tensors_of(hints: HintFile, scale: str) -> container.Arrays:
    """The tensors of the file by name; rows that are missing are overwritten.

    Raises:
        HintFormatError: as `to_bytes`.
    """
    if scale not in SCALE_KINDS:
        raise HintFormatError(f"scale: got {scale!r}, expected one of {', '.join(SCALE_KINDS)}", field="scale")
    arrays: container.Arrays = {"token_ids": hints.token_ids}
    for site in hints.sites:
        arrays |= _encode_site(site, scale)
    if hints.logprobs is not None:
        arrays["logprobs"] = hints.logprobs
        arrays["logprobs.present"] = pack_mask(~np.isnan(hints.logprobs))
    if hints.routed_experts is not None:
        arrays |= _encode_routed(hints.routed_experts, hints.routed_present)
    return arrays


def metadata_of(hints: HintFile, scale: str) -> dict[str, str]:
    """The metadata of the file, without that of its tensors."""
    return {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "recipe_id": hints.recipe_id,
        "model_digest": hints.model_digest,
        "weight_versions": container.canonical([list(span) for span in hints.weight_versions]),
        "first_token": str(hints.first_token),
        "rows": str(hints.rows),
        "next_token_id": container.canonical(hints.next_token_id),
        "sites": container.canonical(
            {
                site.name: {
                    "layers": list(site.layers),
                    "values": site.values,
                    "codes": site.code_kind,
                    "scale": scale,
                    "groups": site.groups,
                    "global_scale": site.global_kind,
                }
                for site in hints.sites
            }
        ),
        "bit_order": BIT_ORDER,
        "token_ids_digest": token_ids_digest(hints.token_ids),
    }


def _encode_site(site: Site, scale: str) -> container.Arrays:
    if scale != "none" and site.scale_kind not in ("byte", scale):
        raise HintFormatError(
            f"{site.name}: holds its scales as {site.scale_kind!r}, which cannot be written as {scale!r}", field="scale"
        )
    missing = ~site.present
    arrays: container.Arrays = {
        f"{site.name}.present": pack_mask(site.present),
    }
    if site.codes is None:
        arrays[f"{site.name}.bits"] = _poisoned(site.bits, missing, 0xFFFF)
    else:
        arrays[f"{site.name}.codes"] = _poisoned(site.codes, missing, POISON)
    if scale == "byte" and site.scales is not None:
        arrays[f"{site.name}.scale"] = _poisoned(site.scales, missing, POISON)
    elif scale == "lsb" and site.scales is not None:
        packed = np.packbits(site.scales & 1, axis=-1, bitorder=BIT_ORDER)
        arrays[f"{site.name}.scale_lsb"] = _poisoned(packed, missing, POISON)
    if site.global_log2 is not None:
        arrays[f"{site.name}.global_log2"] = _poisoned(site.global_log2, missing, POISON_LOG2)
    if site.global_scale is not None:
        arrays[f"{site.name}.global_scale"] = _poisoned(site.global_scale, missing, float("nan"))
    return arrays


def _poisoned(array: NDArray[Any], missing: NDArray[np.bool_], value: float) -> NDArray[Any]:
    """Rows that are missing are overwritten, so that nothing stale or plausible is left under the mask."""
    if not missing.any():
        return array
    out = array.copy()
    out[missing] = value
    return out


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """bool [T] to uint8 [ceil(T/8)], row t in bit t mod 8 of byte t div 8."""
    return np.packbits(mask, bitorder=BIT_ORDER)


def _encode_routed(routed: NDArray[Any], routed_present: NDArray[np.bool_] | None) -> container.Arrays:
    present = np.ones(routed.shape[0], dtype=np.bool_) if routed_present is None else routed_present
    known = routed[present]
    if known.size and (int(known.min()) < 0 or int(known.max()) >= 0xFFFF):
        raise HintFormatError(
            f"routed_experts: got ids from {known.min()} to {known.max()}, expected 0 to {0xFFFE}",
            field="routed_experts",
        )
    small = not known.size or int(known.max()) < POISON
    dtype: Any = np.uint8 if small else np.uint16
    filled = np.full(routed.shape, np.iinfo(dtype).max, dtype=dtype)
    filled[present] = known
    return {"routed_experts": filled, "routed_experts.present": pack_mask(present)}
