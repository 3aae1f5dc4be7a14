"""Reading wire format version 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.rows import CODE_KINDS, SCALE_KINDS, HintFile, Site, check_array, check_layers
from trace_serve.hints.schema import (
    BIT_ORDER,
    FORMAT,
    GLOBAL_BYTES,
    METADATA_KEYS,
    SCHEMA_VERSION,
    SITE_KEYS,
    lowest_bits,
    lsb_bytes,
    token_ids_digest,
)
from trace_serve.recipe import BLOCK


def from_arrays(
    arrays: container.Arrays,
    metadata: dict[str, str],
    *,
    expect_recipe_id: str | None = None,
    expect_token_ids: Sequence[int] | NDArray[Any] | None = None,
) -> HintFile:
    """Reads what `container.decode` gives; `arrays` is emptied. Args, Raises: as `wire.from_bytes`."""
    check_schema(metadata)
    if expect_recipe_id is not None and metadata["recipe_id"] != expect_recipe_id:
        raise HintFormatError(
            f"hint file recipe_id: got {metadata['recipe_id']}, expected {expect_recipe_id}; "
            f"use hints of a rollout under the same recipe",
            field="recipe_id",
        )
    rows = number(metadata, "rows")
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
    return HintFile(
        token_ids=token_ids,
        sites=decoded,
        recipe_id=metadata["recipe_id"],
        model_digest=metadata["model_digest"],
        weight_versions=decode_versions(metadata["weight_versions"]),
        first_token=number(metadata, "first_token"),
        logprobs=logprobs,
        routed_experts=routed,
        routed_present=routed_present,
        next_token_id=decode_next_token(metadata["next_token_id"]),
    )


def check_schema(metadata: dict[str, str]) -> None:
    """Raises HintFormatError unless the metadata is that of version 1."""
    if metadata.get("format") != FORMAT or metadata.get("schema_version") != str(SCHEMA_VERSION):
        got = f"{metadata.get('format')!r} version {metadata.get('schema_version')!r}"
        raise HintFormatError(
            f"hint file schema_version: got {got}, expected {FORMAT!r} version {SCHEMA_VERSION}", field="schema_version"
        )
    if set(metadata) != METADATA_KEYS:
        odd = ", ".join(sorted(set(metadata) ^ METADATA_KEYS))
        raise HintFormatError(f"hint file metadata: unknown or missing keys: {odd}", field="metadata")
    if metadata["bit_order"] != BIT_ORDER:
        raise HintFormatError(
            f"hint file bit_order: got {metadata['bit_order']!r}, expected {BIT_ORDER!r}", field="bit_order"
        )


def number(metadata: dict[str, str], key: str) -> int:
    """A whole number of the metadata."""
    value = container.parse(metadata[key], key)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise HintFormatError(f"hint file {key}: got {metadata[key]!r}, expected a whole number", field=key)
    return value


def _take(arrays: container.Arrays, name: str) -> NDArray[Any]:
    if name not in arrays:
        raise HintFormatError(f"hint file {name}: the tensor is missing", field=name)
    return arrays.pop(name)


def _decode_site(name: str, entry: Any, arrays: container.Arrays, rows: int) -> Site:
    if not isinstance(entry, dict) or set(entry) != SITE_KEYS or not isinstance(entry["layers"], list):
        expected = ", ".join(sorted(SITE_KEYS))
        raise HintFormatError(f"hint file sites {name}: unknown or missing keys, expected {expected}", field="sites")
    layers, values, scale = tuple(entry["layers"]), entry["values"], entry["scale"]
    for key, known in (("codes", CODE_KINDS), ("scale", SCALE_KINDS), ("global_scale", tuple(GLOBAL_BYTES))):
        if entry[key] not in known:
            raise HintFormatError(
                f"hint file sites {name}: {key} is {entry[key]!r}, expected one of {', '.join(known)}", field="sites"
            )
    if type(values) is not int or values <= 0 or values % BLOCK:
        raise HintFormatError(f"hint file sites {name}: values is {values!r}, expected a multiple of 16", field="sites")
    check_layers(name, layers)
    shape = (rows, len(layers), values // BLOCK)
    scales: NDArray[np.uint8] | None = None
    if scale == "lsb":
        packed = _take(arrays, f"{name}.scale_lsb")
        check_array(f"{name}.scale_lsb", packed, np.uint8, (*shape[:2], lsb_bytes(shape[2])))
        scales = np.unpackbits(packed, axis=-1, count=shape[2], bitorder=BIT_ORDER)
    elif scale == "byte":
        scales = _take(arrays, f"{name}.scale")
    codes: NDArray[np.uint8] | None = None
    if entry["codes"] == "full":
        codes = _take(arrays, f"{name}.codes")
        check_array(f"{name}.codes", codes, np.uint8, (*shape[:2], values // 2))
        bits = lowest_bits(codes)
    else:
        bits = _take(arrays, f"{name}.bits")
        check_array(f"{name}.bits", bits, np.uint16, shape)
    kind = entry["global_scale"]
    return Site(
        name=name,
        layers=layers,
        bits=bits,
        scales=scales,
        present=unpack_mask(_take(arrays, f"{name}.present"), rows, f"{name}.present"),
        global_log2=_take(arrays, f"{name}.global_log2") if kind == "log2" else None,
        scale_kind=scale,
        groups=entry["groups"],
        global_scale=_take(arrays, f"{name}.global_scale") if kind == "fp32" else None,
        codes=codes,
    )


def _decode_extras(
    arrays: container.Arrays, rows: int
) -> tuple[NDArray[np.float32] | None, NDArray[Any] | None, NDArray[np.bool_] | None]:
    logprobs = routed = routed_present = None
    if "logprobs" in arrays:
        logprobs = arrays.pop("logprobs")
        check_array("logprobs", logprobs, np.float32, (rows,))
        mask = unpack_mask(_take(arrays, "logprobs.present"), rows, "logprobs.present")
        if not np.array_equal(mask, ~np.isnan(logprobs)):
            raise HintFormatError("hint file logprobs: the mask does not match the values", field="logprobs")
    if "routed_experts" in arrays:
        routed = arrays.pop("routed_experts")
        if routed.dtype not in (np.uint8, np.uint16):
            raise HintFormatError(
                f"hint file routed_experts: got {routed.dtype}, expected uint8 or uint16", field="routed_experts"
            )
        mask_name = "routed_experts.present"
        routed_present = unpack_mask(_take(arrays, mask_name), rows, mask_name)
    return logprobs, routed, routed_present


def decode_next_token(text: str) -> int | None:
    """The id of `next_token_id`."""
    found: int | None = container.parse(text, "next_token_id")
    if found is not None and (type(found) is not int or not -1 << 31 <= found < 1 << 31):
        raise HintFormatError("hint file next_token_id: expected null or an id of 32 bits", field="next_token_id")
    return found


def decode_versions(text: str) -> tuple[tuple[int, int, str], ...]:
    """The spans of `weight_versions`."""
    spans = container.parse(text, "weight_versions")
    if not isinstance(spans, list) or not all(isinstance(span, list) and len(span) == 3 for span in spans):
        raise HintFormatError(
            "hint file weight_versions: expected a list of [start, end, version]", field="weight_versions"
        )
    return tuple((span[0], span[1], span[2]) for span in spans)


def unpack_mask(packed: NDArray[Any], rows: int, name: str) -> NDArray[np.bool_]:
    """uint8 [ceil(rows/8)] to bool [rows]."""
    check_array(name, packed, np.uint8, ((rows + 7) // 8,))
    bits = np.unpackbits(packed, bitorder=BIT_ORDER)
    if bits[rows:].any():
        raise HintFormatError(f"hint file {name}: bits are set beyond row {rows}; the file is damaged", field=name)
    return bits[:rows].astype(np.bool_)
