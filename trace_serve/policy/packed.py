"""Checks a packed checkpoint by its headers: which tensors there are, their dtypes and shapes, against the recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path

from trace_serve.errors import PolicyError
from trace_serve.policy import expert_names
from trace_serve.policy.expert_names import ExpertMatrix
from trace_serve.policy.layouts import CONFIG_FILE, KV_SCALES, LAYOUTS, Declared, Layout, declares_nvfp4, detect
from trace_serve.policy.model import SUPPORTED_MODEL_TYPES, ModelShape
from trace_serve.policy.storable import check_serves
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.policy.weights import TensorInfo, read_weights
from trace_serve.recipe import BLOCK, Recipe

_PROJECTIONS = ("gate", "up", "down")
_CALIBRATION = ("pre_quant_scale", "weight_zero_point", "weight_g_idx", "svdquant_lora_a", "svdquant_lora_b")
"""Tensors that change what the codes stand for."""

PackedModules = dict[str, dict[str, TensorInfo]]
"""Module name to its tensors by part."""


def check_directory(directory: Path | str, recipe: Recipe) -> tuple[Declared, PackedModules] | None:
    """Checks the headers of a model directory that is to be served under a recipe.

    With experts in BF16 only a packed checkpoint is refused: whatever else SGLang loads is its own matter.

    Returns:
        The layout and the packed modules, or None where experts are not packed.

    Raises:
        PolicyError: a shard is missing or truncated (the file is named), or as `detect` and `check_packed`.
    """
    root = Path(directory)
    if recipe.experts == "bf16" and not declares_nvfp4(root):
        return None
    declared = detect(root)
    tensors = read_weights(root)
    if declared is None:
        check_unpacked(root, tensors)
        return None
    config = read_json_object(root / CONFIG_FILE) if (root / CONFIG_FILE).is_file() else {}
    model = ModelShape.from_config(config) if config.get("model_type") in SUPPORTED_MODEL_TYPES else None
    return declared, check_packed(root, tensors, declared, recipe, model)


def check_unpacked(directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuses packed tensors in a directory whose config declares none.

    Raises:
        PolicyError: naming the first tensor.
    """
    suffixes = {part for layout in LAYOUTS.values() for part in layout.parts} - {"weight"}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if expert_names.parse(module) and (part in suffixes or info.dtype == "U8"):
            raise PolicyError(
                f"{directory}: tensor {name!r} ({info.dtype}) is packed, but no quantization_config says so; "
                "restore config.json",
                field=name,
            )


def packed_modules(tensors: Mapping[str, TensorInfo], layout: Layout) -> PackedModules:
    """The modules that have codes or scales of the layout, each with the tensors that are there."""
    found: PackedModules = defaultdict(dict)
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if part in layout.parts:
            found[module][part] = info
    unpacked = {m for m, parts in found.items() if set(parts) == {"weight"} and parts["weight"].dtype != "U8"}
    return {module: parts for module, parts in found.items() if module not in unpacked}


def check_packed(
    directory: Path,
    tensors: Mapping[str, TensorInfo],
    declared: Declared,
    recipe: Recipe,
    model: ModelShape | None = None,
) -> PackedModules:
    """Checks every packed module of a checkpoint, without reading data.

    Args:
        directory: for messages.
        tensors: as `read_weights` returns them.
        declared: what the config says.
        recipe: the recipe it is to be served under.
        model: dimensions to compare with; None compares the experts with each other only.

    Returns:
        The packed modules.

    Raises:
        PolicyError: naming the tensor: something outside the routed experts is packed; a tensor is missing or has
            another dtype or shape; an expert is missing; a layer is packed and BF16 in the recipe, or the reverse.
    """
    check_serves(recipe, declared, directory)
    layout = declared.layout
    modules = packed_modules(tensors, layout)
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part in _CALIBRATION:
            raise PolicyError(f"{directory}: tensor {name!r} changes what the codes mean; not supported", field=name)
        if part in KV_SCALES:
            continue
        if module in modules and part not in layout.parts:
            raise PolicyError(
                f"{directory}: tensor {name!r} is not of {layout.name}, expected {', '.join(layout.parts)}", field=name
            )
    for module, parts in modules.items():
        _check_module(directory, layout, module, parts, model)
    _check_experts(directory, tensors, modules, layout, recipe, model)
    return modules


def _check_module(
    directory: Path, layout: Layout, module: str, parts: Mapping[str, TensorInfo], model: ModelShape | None
) -> None:
    matrix = expert_names.parse(module)
    if matrix is None:
        raise PolicyError(
            f"{directory}: {module!r} is packed; a recipe keeps everything outside the routed experts in BF16",
            field=module,
        )
    for part in layout.required:
        if part not in parts:
            raise PolicyError(
                f"{directory}: tensor '{module}.{part}' is missing; {layout.name} needs it", field=f"{module}.{part}"
            )
    rows, packed = _matrix(directory, module, layout.codes, parts[layout.codes], "U8")
    columns = 2 * packed
    if model is not None:
        wide = (model.hidden, model.intermediate) if matrix.projection == "down" else (model.intermediate, model.hidden)
        if (rows, columns) != wide:
            raise PolicyError(
                f"{directory}: tensor '{module}.{layout.codes}' holds a matrix {[rows, columns]}, expected "
                f"{list(wide)} by config.json",
                field=f"{module}.{layout.codes}",
            )
    scales = _matrix(directory, module, layout.scales, parts[layout.scales], "F8_E4M3")
    if columns % BLOCK or scales != (rows, columns // BLOCK):
        raise PolicyError(
            f"{directory}: tensor '{module}.{layout.scales}' has shape {list(scales)}, expected "
            f"{[rows, columns // BLOCK]}: one scale per {BLOCK} values",
            field=f"{module}.{layout.scales}",
        )
    for part in (layout.global_scale, layout.input_scale):
        info = parts.get(part)
        if info is not None and (info.dtype != "F32" or prod(info.shape) != 1):
            raise PolicyError(
                f"{directory}: tensor '{module}.{part}' is {info.dtype} {list(info.shape)}, expected one F32 number",
                field=f"{module}.{part}",
            )


def _matrix(directory: Path, module: str, part: str, info: TensorInfo, dtype: str) -> tuple[int, int]:
    if info.dtype != dtype or len(info.shape) != 2:
        raise PolicyError(
            f"{directory}: tensor '{module}.{part}' is {info.dtype} {list(info.shape)}, expected {dtype} of 2 "
            "dimensions",
            field=f"{module}.{part}",
        )
    return info.shape[0], info.shape[1]


def _check_experts(
    directory: Path,
    tensors: Mapping[str, TensorInfo],
    modules: PackedModules,
    layout: Layout,
    recipe: Recipe,
    model: ModelShape | None,
) -> None:
    """Every expert of a layer is packed, or none is, as the recipe says."""
    packed: dict[int, dict[tuple[int, str], ExpertMatrix]] = defaultdict(dict)
    plain: dict[int, str] = {}
    matrices = [matrix for module in modules if (matrix := expert_names.parse(module))]
    for matrix in matrices:
        packed[matrix.layer][matrix.expert, matrix.projection] = matrix
    if not matrices:
        raise PolicyError(
            f"{directory}: config.json declares {layout.name}, but no expert has a tensor '{layout.codes}' of codes",
            field="weights",
        )
    for name in tensors:
        module = name.removesuffix(".weight")
        if (matrix := expert_names.parse(module)) and module not in modules:
            plain.setdefault(matrix.layer, name)
    experts = model.experts if model else 1 + max(matrix.expert for matrix in matrices)
    layers = model.expert_layers if model else sorted({*packed, *plain})
    for layer in layers:
        if not recipe.quantizes_experts(layer):
            if layer in packed:
                first = next(iter(packed[layer].values())).module
                raise PolicyError(
                    f"{directory}: {first!r} is packed, the recipe keeps layer {layer} in BF16; correct expert_layers",
                    field="expert_layers",
                )
            continue
        if layer in plain:
            raise PolicyError(
                f"{directory}: tensor {plain[layer]!r} is not packed, the recipe quantizes layer {layer}; correct "
                "expert_layers, or serve the BF16 model",
                field=plain[layer],
            )
        for expert in range(experts):
            for projection in _PROJECTIONS:
                if (expert, projection) not in packed[layer]:
                    name = f"{matrices[0].named(layer, expert, projection)}.{layout.codes}"
                    raise PolicyError(f"{directory}: tensor {name!r} is missing", field=name)
