"""What a checkpoint directory says about its formats: configuration and the dtypes of its tensors, without torch."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from eval_gate.arms.evidence import CheckpointEvidence
from trace_serve.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20
_EXPERT = re.compile(r"\.layers\.(\d+)\..*experts\..*\.(weight|weight_packed|weight_scale)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def read_checkpoint(directory: Path) -> CheckpointEvidence:
    """Counts the layers whose experts are packed FP4: bytes of two codes with E4M3 scales.

    The layouts are those of ModelOpt (`weight`, `weight_scale`) and compressed-tensors (`weight_packed`).

    Raises:
        ConfigError: there are no safetensors files, or one is damaged.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{directory}: has no safetensors files, expected the checkpoint that is served", field="checkpoint"
        )
    dtypes: dict[str, str] = {}
    for file in files:
        dtypes |= _dtypes(file)
    layers = {int(found[1]) for name in dtypes if (found := _LAYER.search(name))}
    codes: dict[int, set[str]] = {}
    scales: dict[int, set[str]] = {}
    for name, dtype in dtypes.items():
        found = _EXPERT.search(name)
        if found:
            kind = scales if found[2] == "weight_scale" else codes
            kind.setdefault(int(found[1]), set()).add(dtype)
    packed = [layer for layer, kinds in codes.items() if kinds == {"U8"} and scales.get(layer) == {"F8_E4M3"}]
    return CheckpointEvidence(
        directory=directory.name,
        quantization=_quantization(directory),
        kv_cache=_kv_cache(directory),
        expert_layers=len(codes),
        expert_layers_fp4=len(packed),
        layers_total=len(layers),
    )


def _dtypes(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{path}: damaged: a header of {size} bytes", field="checkpoint")
        try:
            header = json.loads(file.read(size))
            return {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{path}: damaged: its header is not that of safetensors", field="checkpoint") from exc


def _configured(directory: Path) -> dict[str, Any]:
    """The quantization part of `config.json`, or of ModelOpt's `hf_quant_config.json`."""
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        try:
            part = json.loads((directory / name).read_bytes()).get(key)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(part, dict):
            return part
    return {}


def _quantization(directory: Path) -> str | None:
    part = _configured(directory)
    for key in ("quant_algo", "format", "quant_method"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return None


def _kv_cache(directory: Path) -> str | None:
    part = _configured(directory)
    scheme = part.get("kv_cache_scheme") or part.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        return f"{scheme.get('type')}{scheme.get('num_bits')}"
    return scheme if isinstance(scheme, str) else None
