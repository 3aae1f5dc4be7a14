"""Random hint files, and files that are damaged or hostile and yet have every checksum right."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import numpy as np
from hint_factory import RECIPE_ID, with_codes
from hypothesis import strategies as st

from trace_serve.hints import container, wire

DEEP = "[" * 100_000

HOSTILE_JSON: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    16,
    48,
    2**31 - 1,
    2**31,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e300,
    "",
    "lsb",
    "byte",
    "none",
    "full",
    "static",
    "log2",
    "fp32",
    "\ud800",
    "ä" * 20,
    [],
    [0],
    [1, 0],
    [0, 0],
    [0, 65535],
    [65536],
    [True],
    ["0"],
    [[]],
    {},
    {"a": 1},
    {"k": {}},
    [[0, 5, "7"], [5, 9, "8"]],
    [[0, 9, "7"], [9, 9, "8"]],
    [[0, 9, 7]],
    [[0, 10**30, "7"]],
    [[9, 0, "7"]],
]
HOSTILE_TEXT = [
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-0",
    " 9 ",
    "09",
    "9.0",
    "9" * 5000,
    DEEP,
    '{"a":' * 100_000,
    '{"k":{},"k":{}}',
    "\x00",
    "\ud800",
    "ä",
    "9",
    "little",
    "1",
]


@st.composite
def hint_files(draw: st.DrawFn) -> wire.HintFile:
    """Any hint file that the product can write."""
    rows = draw(st.integers(0, 17))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sites = []
    for name in draw(st.lists(st.sampled_from(["experts_in", "k", "v", "experts_mid"]), unique=True)):
        layers = tuple(sorted(draw(st.sets(st.integers(0, 65535), min_size=1, max_size=3))))
        groups = draw(st.integers(1, 3))
        shape = (rows, len(layers), groups * draw(st.integers(1, 6)))
        kind = draw(st.sampled_from(["static", "log2", "fp32"]))
        per_group = (rows, len(layers), groups)
        site = wire.Site(
            name=name,
            layers=layers,
            bits=rng.integers(0, 1 << 16, shape, dtype=np.uint16),
            scales=rng.integers(0, 256, shape, dtype=np.uint8),
            present=rng.random(rows) < draw(st.sampled_from([0.0, 0.7, 1.0])),
            global_log2=rng.integers(-100, 117, per_group, dtype=np.int8) if kind == "log2" else None,
            global_scale=rng.random(per_group, dtype=np.float32) if kind == "fp32" else None,
            groups=groups,
        )
        sites.append(with_codes(site, draw(st.integers(0, 99))) if draw(st.booleans()) else site)
    logprobs = -rng.random(rows).astype(np.float32)
    logprobs[rng.random(rows) < 0.5] = np.nan
    top = draw(st.sampled_from([4, 255, 256, 60000]))
    with_routes = draw(st.booleans())
    middle = draw(st.integers(0, rows))
    spans = ((0, middle, "7"), (middle, rows, "ä")) if draw(st.booleans()) else ((0, rows, "7"),)
    return wire.HintFile(
        token_ids=rng.integers(0, 1 << 31, rows, dtype=np.int64).astype(np.int32),
        sites=tuple(sites),
        recipe_id=RECIPE_ID,
        model_digest=draw(st.sampled_from(["", "sha256:" + "cd" * 32])),
        weight_versions=spans,
        first_token=draw(st.sampled_from([0, 3, 2**31 - 1])),
        logprobs=logprobs if draw(st.booleans()) else None,
        routed_experts=rng.integers(0, top, (rows, 2, 3), dtype=np.int32) if with_routes else None,
        routed_present=rng.random(rows) < 0.8 if with_routes and draw(st.booleans()) else None,
        next_token_id=draw(st.sampled_from([None, 0, 2**31 - 1])),
    )


def split_file(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def forge(header: dict[str, Any], body: bytes, *, tensors: bool = True) -> bytes:
    """A file with this header and every checksum that it names made right, as far as the header allows."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        if tensors:
            entries = {}
            for name, entry in header.items():
                if name != "__metadata__" and isinstance(entry, dict):
                    try:
                        begin, end = entry["data_offsets"]
                        digest = hashlib.sha256(body[begin:end]).hexdigest()
                    except (TypeError, ValueError, KeyError):
                        digest = ""
                    entries[name] = {"dtype": entry.get("dtype"), "shape": entry.get("shape"), "sha256": digest}
            metadata["tensors"] = container.canonical(entries)
        metadata.pop("metadata_sha256", None)
        metadata["metadata_sha256"] = hashlib.sha256(container.canonical(metadata).encode()).hexdigest()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@st.composite
def hostile(draw: st.DrawFn, whole: bytes) -> bytes:
    """One or two changes of a file, of its bytes or of its header."""
    data = whole
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(
            st.sampled_from(["cut", "flip", "insert", "length", "metadata", "site", "tensor", "body", "layout"])
        )
        try:
            header, body = split_file(data)
            if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
                kind = "flip"
        except (ValueError, RecursionError):
            kind = "flip"
        if kind == "cut":
            data = data[: draw(st.integers(0, len(data)))]
        elif kind == "flip" and data:
            at = draw(st.integers(0, len(data) - 1))
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif kind == "insert":
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.binary(min_size=1, max_size=9)) + data[at:]
        elif kind == "length":
            data = draw(st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])).to_bytes(8, "little") + data[8:]
        elif kind in ("metadata", "site", "tensor", "body", "layout"):
            data = draw(_changed(kind, header, body))
    return data


def _any_json() -> st.SearchStrategy[Any]:
    return st.sampled_from(HOSTILE_JSON)


@st.composite
def _changed(draw: st.DrawFn, kind: str, header: dict[str, Any], body: bytes) -> bytes:
    header = copy.deepcopy(header)
    metadata = header["__metadata__"]
    if kind == "metadata" and metadata:
        key = draw(st.sampled_from(sorted(metadata)))
        how = draw(st.sampled_from(["json", "text", "raw", "drop", "add", "double"]))
        if how == "json":
            metadata[key] = container.canonical(draw(_any_json()))
        elif how == "text":
            metadata[key] = draw(st.sampled_from(HOSTILE_TEXT))
        elif how == "raw":
            metadata[key] = draw(_any_json())
        elif how == "drop":
            del metadata[key]
        elif how == "add":
            metadata["extra"] = "1"
        else:
            metadata[key] = f'{{"a":{metadata[key]},"a":1}}'
        return forge(header, body, tensors=key != "tensors")
    if kind == "site":
        try:
            sites = json.loads(metadata["sites"])
            name = draw(st.sampled_from(sorted(sites)))
            key = draw(st.sampled_from(sorted(sites[name])))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return forge(header, body)
        how = draw(st.sampled_from(["value", "value", "value", "drop", "add", "rename"]))
        if how == "value":
            sites[name][key] = draw(_any_json())
        elif how == "drop":
            del sites[name][key]
        elif how == "add":
            sites[name]["extra"] = 1
        else:
            sites[draw(st.sampled_from(["k", "q", "", "../k", "experts_in"]))] = sites.pop(name)
        metadata["sites"] = container.canonical(sites)
        return forge(header, body)
    names = sorted(name for name in header if name != "__metadata__")
    if not names:
        return forge(header, body)
    name = draw(st.sampled_from(names))
    if kind == "tensor":
        entry = header[name]
        how = draw(st.sampled_from(["dtype", "shape", "offsets", "drop", "rename", "extra", "whole"]))
        if how == "whole" or not isinstance(entry, dict):
            header[name] = draw(_any_json())
        elif how == "dtype":
            entry["dtype"] = draw(st.sampled_from(["U8", "I8", "U16", "I32", "F32", "F64", "BF16", "", None, []]))
        elif how == "shape":
            shapes = [
                [],
                [0],
                [0, 10**30],
                [1] * 70,
                [10**12] * 3,
                [-1, -2],
                [2**63, 0],
                [0, 2**62, 2**62],
                [1.0],
                None,
            ]
            entry["shape"] = draw(st.sampled_from(shapes))
            if draw(st.booleans()) and isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
                entry["data_offsets"] = [entry["data_offsets"][0]] * 2
        elif how == "offsets":
            entry["data_offsets"] = draw(
                st.sampled_from([[0, 0], [0, 10**30], [-8, 8], [8, 0], [0], [0, 1, 2], [0.0, 8.0], ["0", "8"], None])
            )
        elif how == "drop":
            del header[name]
        elif how == "rename":
            header[draw(st.sampled_from(["k.bits", "x", "", "k.codes", "ä"]))] = header.pop(name)
        else:
            entry["extra"] = 1
        return forge(header, body)
    if kind == "layout":
        # A tensor without bytes, of a hostile shape, beside the others.
        header["extra"] = {
            "dtype": "U8",
            "shape": draw(st.sampled_from([[0], [0, 10**30], [0] * 70])),
            "data_offsets": [0, 0],
        }
        if draw(st.booleans()):
            header[name], header["extra"] = header["extra"], header[name]
        return forge(header, body)
    if body:
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + bytes([body[at] ^ draw(st.integers(1, 255))]) + body[at + 1 :]
    return forge(header, body)
