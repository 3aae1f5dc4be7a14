"""Wire format version 1 of rounding hints: a safetensors file (docs/hints.md). No torch here."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.rows import SCALE_KINDS, HintFile, Site, check_array, check_layers, require_nonzero
from trace_serve.recipe import BLOCK

__all__ = [
    "SCHEMA_VERSION",
    "HintFile",
    "Site",
    "bytes_per_token",
    "from_bytes",
    "read",
    "require_nonzero",
    "site_bytes_per_token",
    "to_bytes",
    "token_ids_digest",
    "write",
    "write_bytes",
]

FORMAT = "trace-hints"
SCHEMA_VERSION = 1
BIT_ORDER: Literal["little"] = "little"
_POISON = 0xFF
_POISON_LOG2 = -128
_KEYS = frozenset(
    {
        "format",
        "schema_version",
        "recipe_id",
        "model_digest",
        "weight_versions",
        "first_token",
        "rows",
        "next_token_id",
        "sites",
        "bit_order",
        "token_ids_digest",
    }
)


def token_ids_digest(token_ids: NDArray[np.int32]) -> str:
    """`sha256:` of the ids as little-endian int32."""
    return "sha256:" + hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()


def site_bytes_per_token(values: int, layers: int, *, scale: str = "lsb", global_log2: bool) -> int:
    """Bytes of one row of a site, masks excluded.

    Args:
        values: quantized values a token and layer, a multiple of 16.
        layers: number of layers.
        scale: `lsb` (one bit a block, whole bytes a row and layer) or `byte`.
        global_log2: whether the site has a per-token global scale.
    """
    blocks = values // BLOCK
    return layers * (2 * blocks + (_lsb_bytes(blocks) if scale == "lsb" else blocks) + int(global_log2))


def bytes_per_token(hints: HintFile) -> int:
    """Bytes of hints a token, as this file stores them; token ids, masks and routed experts excluded."""
    return sum(
        site_bytes_per_token(
            site.values, len(site.layers), scale=site.scale_kind, global_log2=site.global_log2 is not None
        )
        for site in hints.sites
    )


def _lsb_bytes(blocks: int) -> int:
    return (blocks + 7) // 8


def to_bytes(hints: HintFile, *, scale: str = "lsb") -> bytes:
    """The file as bytes; the same contents always give the same bytes.

    Args:
        hints: what to write; a site that holds only lowest bits cannot be written as bytes.
        scale: `lsb` keeps the lowest bit of each scale byte, `byte` the whole byte.

    Raises:
        HintFormatError: an unknown `scale`, or one that the site does not have.
    """
    if scale not in SCALE_KINDS:
        raise HintFormatError(f"scale: got {scale!r}, expected one of {', '.join(SCALE_KINDS)}", field="scale")
    arrays: container.Arrays = {"token_ids": hints.token_ids}
    for site in hints.sites:
        arrays |= _encode_site(site, scale)
    if hints.logprobs is not None:
        arrays["logprobs"] = hints.logprobs
        arrays["logprobs.present"] = _pack_mask(~np.isnan(hints.logprobs))
    if hints.routed_experts is not None:
        arrays |= _encode_routed(hints.routed_experts, hints.routed_present)
    metadata = {
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
                    "scale": scale,
                    "global_log2": site.global_log2 is not None,
                }
                for site in hints.sites
            }
        ),
        "bit_order": BIT_ORDER,
        "token_ids_digest": token_ids_digest(hints.token_ids),
    }
    return container.encode(arrays, metadata)


def _encode_site(site: Site, scale: str) -> container.Arrays:
    if scale == "byte" and site.scale_kind == "lsb":
        raise HintFormatError(
            f"{site.name}: holds only the lowest bit of its scales, which cannot be written as bytes", field="scale"
        )
    missing = ~site.present
    arrays: container.Arrays = {
        f"{site.name}.bits": _poisoned(site.bits, missing, 0xFFFF),
        f"{site.name}.present": _pack_mask(site.present),
    }
    if scale == "byte":
        arrays[f"{site.name}.scale"] = _poisoned(site.scales, missing, _POISON)
    else:
        packed = np.packbits(site.scales & 1, axis=-1, bitorder=BIT_ORDER)
        arrays[f"{site.name}.scale_lsb"] = _poisoned(packed, missing, _POISON)
    if site.global_log2 is not None:
        arrays[f"{site.name}.global_log2"] = _poisoned(site.global_log2, missing, _POISON_LOG2)
    return arrays


def _poisoned(array: NDArray[Any], missing: NDArray[np.bool_], value: int) -> NDArray[Any]:
    """Rows that are missing are overwritten, so that nothing stale or plausible is left under the mask."""
    if not missing.any():
        return array
    out = array.copy()
    out[missing] = value
    return out


def _pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(mask, bitorder=BIT_ORDER)


def _unpack_mask(packed: NDArray[Any], rows: int, name: str) -> NDArray[np.bool_]:
    check_array(name, packed, np.uint8, ((rows + 7) // 8,))
    bits = np.unpackbits(packed, bitorder=BIT_ORDER)
    if bits[rows:].any():
        raise HintFormatError(f"hint file {name}: bits are set beyond row {rows}; the file is damaged", field=name)
    return bits[:rows].astype(np.bool_)


def _encode_routed(routed: NDArray[Any], routed_present: NDArray[np.bool_] | None) -> container.Arrays:
    present = np.ones(routed.shape[0], dtype=np.bool_) if routed_present is None else routed_present
    known = routed[present]
    if known.size and (int(known.min()) < 0 or int(known.max()) >= 0xFFFF):
        raise HintFormatError(
            f"routed_experts: got ids from {known.min()} to {known.max()}, expected 0 to {0xFFFE}",
            field="routed_experts",
        )
    small = not known.size or int(known.max()) < _POISON
    dtype: Any = np.uint8 if small else np.uint16
    filled = np.full(routed.shape, np.iinfo(dtype).max, dtype=dtype)
    filled[present] = known
    return {"routed_experts": filled, "routed_experts.present": _pack_mask(present)}


def from_bytes(
    data: bytes, *, expect_recipe_id: str | None = None, expect_token_ids: Sequence[int] | NDArray[Any] | None = None
) -> HintFile:
    """Reads a file; arrays are read-only views of `data` where the layout allows.

    Args:
        data: the whole file.
        expect_recipe_id: refuse hints that were made under another recipe.
        expect_token_ids: refuse hints of other tokens; one id a row.

    Raises:
        HintFormatError: unknown schema, other recipe, other tokens, wrong byte count, wrong checksum, trailing bytes,
            tensors that are missing, unknown or of the wrong shape.
    """
    arrays, metadata = container.decode(data)
    _check_schema(metadata)
    if expect_recipe_id is not None and metadata["recipe_id"] != expect_recipe_id:
        raise HintFormatError(
            f"hint file recipe_id: got {metadata['recipe_id']}, expected {expect_recipe_id}; "
            f"use hints of a rollout under the same recipe",
            field="recipe_id",
        )
    rows = _number(metadata, "rows")
    token_ids = _take(arrays, "token_ids")
    check_array("token_ids", token_ids, np.int32, (rows,))
    if token_ids_digest(token_ids) != metadata["token_ids_digest"]:
        raise HintFormatError("hint file token_ids: digest does not match; the file is damaged", field="token_ids")
    if expect_token_ids is not None and not np.array_equal(token_ids, np.asarray(expect_token_ids)):
        raise HintFormatError(
            f"hint file token_ids: its {rows} tokens differ from the {len(expect_token_ids)} expected; "
            f"pair each sequence with its own hints",
            field="token_ids",
        )
    sites = container.parse(metadata["sites"], "sites")
    if not isinstance(sites, dict):
        raise HintFormatError("hint file sites: not a JSON object", field="sites")
    decoded = tuple(_decode_site(name, entry, arrays, rows) for name, entry in sites.items())
    logprobs, routed, routed_present = _decode_extras(arrays, rows)
    if arrays:
        raise HintFormatError(f"hint file: unknown tensors {', '.join(sorted(arrays))}", field="tensors")
    next_token_id = container.parse(metadata["next_token_id"], "next_token_id")
    if next_token_id is not None and type(next_token_id) is not int:
        raise HintFormatError("hint file next_token_id: expected a whole number or null", field="next_token_id")
    return HintFile(
        token_ids=token_ids,
        sites=decoded,
        recipe_id=metadata["recipe_id"],
        model_digest=metadata["model_digest"],
        weight_versions=_decode_versions(metadata["weight_versions"]),
        first_token=_number(metadata, "first_token"),
        logprobs=logprobs,
        routed_experts=routed,
        routed_present=routed_present,
        next_token_id=next_token_id,
    )


def _check_schema(metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT or metadata.get("schema_version") != str(SCHEMA_VERSION):
        got = f"{metadata.get('format')!r} version {metadata.get('schema_version')!r}"
        raise HintFormatError(
            f"hint file schema_version: got {got}, expected {FORMAT!r} version {SCHEMA_VERSION}", field="schema_version"
        )
    if set(metadata) != _KEYS:
        odd = ", ".join(sorted(set(metadata) ^ _KEYS))
        raise HintFormatError(f"hint file metadata: unknown or missing keys: {odd}", field="metadata")
    if metadata["bit_order"] != BIT_ORDER:
        raise HintFormatError(
            f"hint file bit_order: got {metadata['bit_order']!r}, expected {BIT_ORDER!r}", field="bit_order"
        )


def _number(metadata: dict[str, str], key: str) -> int:
    value = container.parse(metadata[key], key)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise HintFormatError(f"hint file {key}: got {metadata[key]!r}, expected a whole number", field=key)
    return value


def _take(arrays: container.Arrays, name: str) -> NDArray[Any]:
    if name not in arrays:
        raise HintFormatError(f"hint file {name}: the tensor is missing", field=name)
    return arrays.pop(name)


def _decode_site(name: str, entry: Any, arrays: container.Arrays, rows: int) -> Site:
    try:
        layers, values, scale, has_log2 = (entry[key] for key in ("layers", "values", "scale", "global_log2"))
        layers = tuple(layers)
    except (KeyError, TypeError) as exc:
        raise HintFormatError(f"hint file sites {name}: incomplete description", field="sites") from exc
    if type(values) is not int or values <= 0 or values % BLOCK or type(has_log2) is not bool:
        raise HintFormatError(f"hint file sites {name}: values or global_log2 cannot be used", field="sites")
    check_layers(name, layers)
    shape = (rows, len(layers), values // BLOCK)
    if scale == "lsb":
        packed = _take(arrays, f"{name}.scale_lsb")
        check_array(f"{name}.scale_lsb", packed, np.uint8, (*shape[:2], _lsb_bytes(shape[2])))
        scales = np.unpackbits(packed, axis=-1, count=shape[2], bitorder=BIT_ORDER)
    elif scale == "byte":
        scales = _take(arrays, f"{name}.scale")
    else:
        raise HintFormatError(f"hint file sites {name}: scale is {scale!r}, expected lsb or byte", field="sites")
    bits = _take(arrays, f"{name}.bits")
    check_array(f"{name}.bits", bits, np.uint16, shape)
    return Site(
        name=name,
        layers=layers,
        bits=bits,
        scales=scales,
        present=_unpack_mask(_take(arrays, f"{name}.present"), rows, f"{name}.present"),
        global_log2=_take(arrays, f"{name}.global_log2") if has_log2 else None,
        scale_kind=scale,
    )


def _decode_extras(
    arrays: container.Arrays, rows: int
) -> tuple[NDArray[np.float32] | None, NDArray[Any] | None, NDArray[np.bool_] | None]:
    logprobs = routed = routed_present = None
    if "logprobs" in arrays:
        logprobs = arrays.pop("logprobs")
        check_array("logprobs", logprobs, np.float32, (rows,))
        mask = _unpack_mask(_take(arrays, "logprobs.present"), rows, "logprobs.present")
        if not np.array_equal(mask, ~np.isnan(logprobs)):
            raise HintFormatError("hint file logprobs: the mask does not match the values", field="logprobs")
    if "routed_experts" in arrays:
        routed = arrays.pop("routed_experts")
        mask_name = "routed_experts.present"
        routed_present = _unpack_mask(_take(arrays, mask_name), rows, mask_name)
    return logprobs, routed, routed_present


def _decode_versions(text: str) -> tuple[tuple[int, int, str], ...]:
    spans = container.parse(text, "weight_versions")
    if not isinstance(spans, list) or not all(isinstance(span, list) and len(span) == 3 for span in spans):
        raise HintFormatError(
            "hint file weight_versions: expected a list of [start, end, version]", field="weight_versions"
        )
    return tuple((span[0], span[1], span[2]) for span in spans)


def write_bytes(path: Path | str, payload: bytes) -> None:
    """Writes a file that appears complete or not at all.

    Raises:
        OSError: the directory is missing or full; nothing is left behind.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(payload)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path | str, hints: HintFile, *, scale: str = "lsb") -> None:
    """`to_bytes` into a file, atomically."""
    write_bytes(path, to_bytes(hints, scale=scale))


def read(
    path: Path | str,
    *,
    expect_recipe_id: str | None = None,
    expect_token_ids: Sequence[int] | NDArray[Any] | None = None,
) -> HintFile:
    """`from_bytes` of a file.

    Raises:
        HintFormatError: the file cannot be read, or as `from_bytes`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise HintFormatError(f"{path}: cannot be read ({exc.strerror})", field=str(path)) from exc
    return from_bytes(data, expect_recipe_id=expect_recipe_id, expect_token_ids=expect_token_ids)
