"""The two on-disk layouts of NVFP4 weights that serving engines read, and which one a model directory has.

Both keep a matrix [N, K] as three tensors: codes uint8 [N, K/2] (even index in the low nibble), block scales E4M3
[N, K/16] in row order, and one fp32 global scale. They differ in names, and in that ModelOpt stores the global scale
as the factor of dequantization while compressed-tensors stores its reciprocal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_serve.errors import PolicyError
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.recipe import BLOCK

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
BF16 = "bf16"


@dataclass(frozen=True)
class Layout:
    """Names of one matrix's tensors, each after the module's name and a dot.

    Attributes:
        name: `modelopt` or `compressed-tensors`.
        codes: packed codes.
        scales: block scales.
        global_scale: global scale of the weights.
        input_scale: static global scale of the module's input.
        reciprocal: whether global scales are stored as 1 / g.
        scalar_shape: shape of a global scale as the layout's own tool writes it.
    """

    name: str
    codes: str
    scales: str
    global_scale: str
    input_scale: str
    reciprocal: bool
    scalar_shape: tuple[int, ...]

    @property
    def required(self) -> tuple[str, str, str]:
        return self.codes, self.scales, self.global_scale

    @property
    def parts(self) -> tuple[str, str, str, str]:
        return *self.required, self.input_scale


MODELOPT = Layout("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", False, ())
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True, (1,)
)
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}
FORMATS = (BF16, *LAYOUTS)
"""What the weights of a policy can be on disk."""

KV_SCALES = ("k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point")
"""Tensors of a KV cache's calibration; the recipe has the KV scales, so an engine of ours leaves them out."""


@dataclass(frozen=True)
class Declared:
    """What a directory's config says about its weights.

    Attributes:
        layout: where each tensor of a matrix is.
        weight_only: whether inputs stay in BF16 (`W4A16_NVFP4`, or no `input_activations`).
    """

    layout: Layout
    weight_only: bool


def detect(directory: Path | str) -> Declared | None:
    """The packed layout that `config.json` or `hf_quant_config.json` declares; None for unquantized weights.

    Raises:
        PolicyError: another quantization than these two layouts of NVFP4, or an unreadable file.
    """
    root = Path(directory)
    where, section = _section(root)
    if section is None:
        return None
    method = str(section.get("quant_method", "modelopt" if section.get("quant_algo") else "")).lower()
    if method.startswith("modelopt"):
        return _modelopt(where, section)
    if method.replace("_", "-") == COMPRESSED_TENSORS.name:
        return _compressed_tensors(where, section)
    raise PolicyError(
        f"{where}: quant_method is {method or None!r}, expected modelopt or compressed-tensors (NVFP4), or no "
        "quantization at all",
        field="quant_method",
    )


def declares_nvfp4(directory: Path | str) -> bool:
    """Whether `detect` finds a packed layout; another quantization, which is SGLang's own matter, is a no."""
    try:
        return detect(directory) is not None
    except PolicyError:
        return False


def _section(root: Path) -> tuple[Path, dict[str, Any] | None]:
    path = root / CONFIG_FILE
    if path.is_file():
        config = read_json_object(path)
        text = config.get("text_config")
        for holder in (config, text if isinstance(text, dict) else {}):
            for key in ("quantization_config", "compression_config"):
                if isinstance(holder.get(key), dict):
                    return path, holder[key]
    path = root / MODELOPT_FILE
    if not path.is_file():
        return path, None
    raw = read_json_object(path)
    nested = raw.get("quantization")
    return path, nested if isinstance(nested, dict) else raw


def _modelopt(where: Path, section: Mapping[str, Any]) -> Declared:
    algorithm = section.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise PolicyError(
            f"{where}: quant_algo is {algorithm!r}, expected NVFP4 or W4A16_NVFP4; quantize the BF16 model again",
            field="quant_algo",
        )
    _check_group_size(where, section.get("group_size"))
    for group in _groups(section):
        weights = group.get("weights")
        _check_group_size(where, weights.get("group_size") if isinstance(weights, dict) else None)
    return Declared(MODELOPT, weight_only=algorithm == "W4A16_NVFP4")


def _compressed_tensors(where: Path, section: Mapping[str, Any]) -> Declared:
    expected = "nvfp4-pack-quantized"
    groups = _groups(section)
    formats = {group.get("format") or section.get("format") for group in groups} or {section.get("format")}
    if formats != {expected}:
        found = ", ".join(sorted(map(repr, formats)))
        raise PolicyError(f"{where}: format is {found}, expected {expected!r} for every group", field="format")
    inputs = []
    for group in groups:
        weights = group.get("weights")
        if not isinstance(weights, dict) or weights.get("num_bits") != 4 or weights.get("type") != "float":
            raise PolicyError(f"{where}: a group's weights are {weights!r}, expected 4-bit floats", field="weights")
        if not weights.get("symmetric", True):
            raise PolicyError(f"{where}: weights have zero points, expected symmetric ones", field="symmetric")
        _check_group_size(where, weights.get("group_size"))
        inputs.append(group.get("input_activations") is not None)
    if len(set(inputs)) != 1:
        raise PolicyError(
            f"{where}: {len(groups)} groups, of which {sum(inputs)} quantize inputs; expected all or none of them",
            field="config_groups",
        )
    return Declared(COMPRESSED_TENSORS, weight_only=not inputs[0])


def _groups(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = section.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _check_group_size(where: Path, size: object) -> None:
    if size not in (None, BLOCK):
        raise PolicyError(f"{where}: group_size is {size!r}, expected {BLOCK}, that of NVFP4", field="group_size")
