"""A reader of hint files written from docs/hints.md alone: it shares no code with the product.

Tensors are read by the safetensors package, everything else with json, hashlib and numpy.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

SITES = {"experts_in", "k", "v", "experts_mid"}
KEYS = {
    "format",
    "schema_version",
    "recipe_id",
    "model_digest",
    "weight_versions",
    "rows",
    "first_token",
    "next_token_id",
    "sites",
    "bit_order",
    "token_ids_digest",
    "tensors",
    "metadata_sha256",
}
SITE_KEYS = {"layers", "values", "codes", "scale", "groups", "global_scale"}


class Refused(Exception):
    """What `A reader refuses` lists."""


def need(condition: Any, why: str) -> None:
    if not condition:
        raise Refused(why)


def read_json(text: str | bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "a repeated key")
        return dict(pairs)

    def constant(name: str) -> None:
        raise Refused(name)

    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=unique, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as exc:
        raise Refused(str(exc)) from exc


def whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def canonical_digest(metadata: dict[str, str]) -> str:
    rest = {key: value for key, value in metadata.items() if key != "metadata_sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read(data: bytes, recipe_id: str | None = None, tokens: list[int] | None = None) -> dict[str, Any]:
    """A file as plain values: `sites[name]` has bits or codes, scales, global scales and the rows that are present."""
    length = int.from_bytes(data[:8], "little")
    need(len(data) >= 8 + length, "cut")
    header = read_json(data[8 : 8 + length])
    need(isinstance(header, dict), "header")
    metadata = header.pop("__metadata__", None)
    need(isinstance(metadata, dict) and set(metadata) == KEYS, "metadata keys")
    need(all(isinstance(value, str) for value in metadata.values()), "metadata values")
    need((metadata["format"], metadata["schema_version"]) == ("trace-hints", "1"), "schema")
    need(metadata["metadata_sha256"] == canonical_digest(metadata), "metadata checksum")
    need(metadata["bit_order"] == "little", "bit order")
    need(recipe_id is None or metadata["recipe_id"] == recipe_id, "recipe")
    described = read_json(metadata["tensors"])
    need(isinstance(described, dict) and set(described) == set(header), "tensor names")
    for name, entry in header.items():
        need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, "header entry")
        try:
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(data[8 + length + begin : 8 + length + end]).hexdigest()
        except (TypeError, ValueError) as exc:
            raise Refused("offsets") from exc
        want = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": digest}
        need(described[name] == want, f"checksum of {name}")
    try:
        # Refuses gaps, overlaps, byte counts that do not fit the shape, and bytes behind the last tensor.
        tensors = dict(load(data))
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError) as exc:
        raise Refused(str(exc)) from exc

    rows, first = read_json(metadata["rows"]), read_json(metadata["first_token"])
    need(whole(rows, 0, 2**31 - 1) and whole(first, 0, 2**31 - 1), "rows or first_token")
    following = read_json(metadata["next_token_id"])
    need(following is None or whole(following, -(2**31), 2**31 - 1), "next_token_id")

    def take(name: str, dtype: str, *shape: int) -> np.ndarray:
        need(name in tensors, f"{name} is missing")
        array = tensors.pop(name)
        need(array.dtype == np.dtype(dtype) and array.shape == shape, f"{name} has another type or shape")
        return array

    def mask(name: str) -> np.ndarray:
        found = np.unpackbits(take(name, "uint8", (rows + 7) // 8), bitorder="little")
        need(not found[rows:].any(), "mask beyond the last row")
        return found[:rows] == 1

    ids = take("token_ids", "int32", rows)
    need(metadata["token_ids_digest"] == "sha256:" + hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest(), "digest")
    need(tokens is None or ids.tolist() == list(tokens), "other tokens")
    sites = read_json(metadata["sites"])
    need(isinstance(sites, dict) and set(sites) <= SITES, "sites")
    found: dict[str, Any] = {name: _site(name, entry, rows, take, mask) for name, entry in sites.items()}
    out: dict[str, Any] = {
        "rows": rows,
        "first_token": first,
        "next_token_id": following,
        "token_ids": ids,
        "sites": found,
        "recipe_id": metadata["recipe_id"],
        "model_digest": metadata["model_digest"],
        "weight_versions": _versions(read_json(metadata["weight_versions"]), rows),
        "logprobs": None,
        "routed_experts": None,
    }
    if "logprobs" in tensors:
        out["logprobs"], known = take("logprobs", "float32", rows), mask("logprobs.present")
        need((known == ~np.isnan(out["logprobs"])).all(), "absent log-probabilities are NaN, others are not")
    if "routed_experts" in tensors:
        routed = tensors.pop("routed_experts")
        need(routed.dtype in (np.uint8, np.uint16) and routed.ndim == 3 and len(routed) == rows, "routed_experts")
        out["routed_experts"], out["routed_present"] = routed, mask("routed_experts.present")
    need(not tensors, "unknown tensors")
    return out


def _versions(spans: Any, rows: int) -> list[tuple[int, int, str]]:
    need(isinstance(spans, list), "weight_versions")
    end = 0
    for span in spans:
        need(isinstance(span, list) and len(span) == 3, "span")
        start, stop, version = span
        need(type(start) is int and type(stop) is int and isinstance(version, str), "span")
        need(start == end and stop >= start, "spans in order")
        end = stop
    need(end == rows, "spans cover the rows")
    return [(start, stop, version) for start, stop, version in spans]


def _site(name: str, entry: Any, rows: int, take: Any, mask: Any) -> dict[str, Any]:
    need(isinstance(entry, dict) and set(entry) == SITE_KEYS, "site keys")
    layers, values, groups = entry["layers"], entry["values"], entry["groups"]
    need(isinstance(layers, list) and layers and all(whole(layer, 0, 65535) for layer in layers), "layers")
    need(layers == sorted(set(layers)), "ascending layers")
    need(type(values) is int and values > 0 and values % 16 == 0, "values")
    blocks, count = values // 16, len(layers)
    need(type(groups) is int and groups > 0 and blocks % groups == 0, "groups")
    site: dict[str, Any] = {"layers": layers, "groups": groups, "scale_kind": entry["scale"]}
    if entry["codes"] == "full":
        codes = take(f"{name}.codes", "uint8", rows, count, 8 * blocks)
        site["codes"] = np.empty((rows, count, values), dtype=np.uint8)
        site["codes"][..., 0::2] = codes & 15
        site["codes"][..., 1::2] = codes >> 4
        site["bits"] = site["codes"] & 1
    else:
        need(entry["codes"] == "lsb", "codes")
        words = take(f"{name}.bits", "uint16", rows, count, blocks)
        site["bits"] = np.empty((rows, count, values), dtype=np.uint8)
        for i in range(16):
            site["bits"][..., i::16] = (words & (1 << i)) != 0
    if entry["scale"] == "lsb":
        packed = take(f"{name}.scale_lsb", "uint8", rows, count, (blocks + 7) // 8)
        site["scales"] = np.stack([packed[..., b // 8] >> (b % 8) & 1 for b in range(blocks)], axis=-1)
    elif entry["scale"] == "byte":
        site["scales"] = take(f"{name}.scale", "uint8", rows, count, blocks)
    else:
        need(entry["scale"] == "none", "scale")
    if entry["global_scale"] == "log2":
        site["global_scale"] = np.exp2(take(f"{name}.global_log2", "int8", rows, count, groups).astype(np.float64))
    elif entry["global_scale"] == "fp32":
        site["global_scale"] = take(f"{name}.global_scale", "float32", rows, count, groups)
    else:
        need(entry["global_scale"] == "static", "global_scale")
    site["present"] = mask(f"{name}.present")
    return site
