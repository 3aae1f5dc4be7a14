"""Writing a BF16 model's weights in a packed NVFP4 layout, under a recipe.

The codes and scales are those that an engine under the recipe makes when it loads the BF16 model: the same kernels, the
same global scale over one expert's gate and up together. Every shard keeps its name and holds what the source's shard
held, so memory stays at one expert's matrices, whatever the size of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.checkpoints.shards import Shards, ShardWriter
from trace_serve.errors import PolicyError
from trace_serve.kernels import kernels_for
from trace_serve.nvfp4 import Quantized
from trace_serve.policy import expert_names
from trace_serve.policy.expert_names import ExpertMatrix
from trace_serve.policy.layouts import Layout
from trace_serve.policy.model import ModelShape
from trace_serve.policy.weights import INDEX_FILE, TensorInfo
from trace_serve.recipe import BLOCK, Recipe

_FLOATS = ("BF16", "F16", "F32")
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class _Matrix:
    """A matrix to pack: which one it is, and the tensor of the source that is it, or has it as a part."""

    at: ExpertMatrix
    name: str
    info: TensorInfo
    part: tuple[int | slice, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        if self.part is None:
            return self.info.shape[0], self.info.shape[1]
        rows = self.part[1]
        assert isinstance(rows, slice)
        return rows.stop - rows.start, self.info.shape[2]


class PackedWriter:
    """Packs the routed experts of one model.

    Args:
        source: model directory.
        tensors: its tensors, as `read_weights` returns them.
        layout: the layout to write.
        recipe: the recipe; it has been checked with `storable.check_storable`.
        model: the model's dimensions.

    Raises:
        PolicyError: an expert that the recipe quantizes is missing or is not floating point.
    """

    def __init__(
        self, source: Path, tensors: Mapping[str, TensorInfo], layout: Layout, recipe: Recipe, model: ModelShape
    ) -> None:
        self._source, self._tensors, self._layout, self._recipe = source, tensors, layout, recipe
        self._matrices = _experts(source, tensors, recipe, model)
        self._packed_tensors = {matrix.name for matrix in self._matrices.values()}
        self._counters = nvfp4.new_counters()
        self._kernels = kernels_for(recipe, "cpu")

    def write(self, out: Path, progress: Callable[[str], None] | None = None) -> dict[str, TensorInfo]:
        """Writes every shard, and the index where the source has one, into an existing directory.

        Args:
            out: directory without these files.
            progress: called with one line before each shard, and at the end if values were lost.

        Returns:
            The tensors written.

        Raises:
            PolicyError: a weight is not finite (the tensor is named), or a source shard cannot be read.
        """
        plan = self._plan()
        with Shards(self._source) as shards:
            for file in sorted({info.file for info in plan.values()}):
                if progress is not None:
                    progress(f"packing {file}")
                here = {name: info for name, info in plan.items() if info.file == file}
                with ShardWriter(out / file, here) as writer:
                    self._write_shard(file, writer, shards)
        if (self._source / INDEX_FILE).is_file():
            index = {
                "metadata": {"total_size": sum(info.nbytes for info in plan.values())},
                "weight_map": {name: plan[name].file for name in sorted(plan)},
            }
            (out / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        lost = {name: count for name, count in zip(nvfp4.INCIDENT_NAMES, self._counters.tolist(), strict=True) if count}
        if lost and progress is not None:
            progress("lost in rounding: " + ", ".join(f"{count} {name}" for name, count in lost.items()))
        return plan

    def _plan(self) -> dict[str, TensorInfo]:
        plan = {name: info for name, info in self._tensors.items() if name not in self._packed_tensors}
        for module, matrix in self._matrices.items():
            rows, columns = matrix.shape
            parts = {
                self._layout.codes: ("U8", (rows, columns // 2)),
                self._layout.scales: ("F8_E4M3", (rows, columns // BLOCK)),
                self._layout.global_scale: ("F32", self._layout.scalar_shape),
            }
            if self._recipe.experts == "w4a4":
                parts[self._layout.input_scale] = ("F32", self._layout.scalar_shape)
            for part, (dtype, shape) in parts.items():
                plan[f"{module}.{part}"] = TensorInfo(matrix.info.file, dtype, shape)
        return plan

    def _write_shard(self, file: str, writer: ShardWriter, shards: Shards) -> None:
        for name, info in self._tensors.items():
            if info.file == file and name not in self._packed_tensors:
                writer.write(name, shards.read(name, info))
        for group in self._groups(file):
            loaded = [shards.read(matrix.name, matrix.info, matrix.part).to(torch.bfloat16) for matrix in group]
            packed = self._quantize(group, torch.cat(loaded))
            start = 0
            for matrix, weight in zip(group, loaded, strict=True):
                rows = slice(start, start + weight.shape[0])
                start += weight.shape[0]
                if matrix.info.file == file:
                    self._write_matrix(writer, matrix, packed, rows)

    def _groups(self, file: str) -> Iterator[list[_Matrix]]:
        """The matrices of a shard, each with the one it shares a global scale with, gate before up."""
        done: set[str] = set()
        for module, matrix in self._matrices.items():
            if matrix.info.file != file or module in done:
                continue
            sibling = matrix.at.sibling
            group = [matrix] if sibling is None else [matrix, self._matrices[sibling]]
            group.sort(key=lambda member: _PROJECTIONS.index(member.at.projection))
            done.update(member.at.module for member in group)
            yield group

    def _quantize(self, group: list[_Matrix], weight: Tensor) -> Quantized:
        packed = self._kernels.quantize_weight(weight, parts=len(group), counters=self._counters)
        if self._counters[nvfp4.INCIDENT_NAMES.index("nonfinite")]:
            names = " or ".join(sorted({repr(member.name) for member in group}))
            raise PolicyError(
                f"{self._source}: tensor {names} has values that are not finite; no engine can serve it", field="source"
            )
        return packed

    def _write_matrix(self, writer: ShardWriter, matrix: _Matrix, packed: Quantized, rows: slice) -> None:
        layout, module = self._layout, matrix.at.module
        writer.write(f"{module}.{layout.codes}", packed.codes[rows])
        writer.write(f"{module}.{layout.scales}", packed.scales[rows].contiguous().view(torch.float8_e4m3fn))
        writer.write(f"{module}.{layout.global_scale}", self._scalar(float(packed.global_scale[rows.start])))
        if self._recipe.experts == "w4a4":
            of_layer = (
                self._recipe.experts_mid_scale if matrix.at.projection == "down" else self._recipe.experts_in_scale
            )
            static = of_layer(matrix.at.layer)
            writer.write(f"{module}.{layout.input_scale}", self._scalar(1.0 if static is None else static))

    def _scalar(self, g: float) -> Tensor:
        stored = torch.full(self._layout.scalar_shape, g, dtype=torch.float32)
        return stored.reciprocal() if self._layout.reciprocal else stored


def _experts(source: Path, tensors: Mapping[str, TensorInfo], recipe: Recipe, model: ModelShape) -> dict[str, _Matrix]:
    """The matrices that the recipe quantizes, by module; all of them, or an error names the first gap."""
    found: dict[str, _Matrix] = {}
    for name, info in tensors.items():
        for matrix in _matrices_of(source, name, info, model):
            at = matrix.at
            if not recipe.quantizes_experts(at.layer):
                continue
            wide = (model.hidden, model.intermediate) if at.projection == "down" else (model.intermediate, model.hidden)
            if info.dtype not in _FLOATS or matrix.shape != wide:
                raise PolicyError(
                    f"{source}: tensor {name!r} is {info.dtype} with a matrix {list(matrix.shape)}, expected "
                    f"{', '.join(_FLOATS)} {list(wide)}",
                    field=name,
                )
            found[at.module] = matrix
    if not found:
        raise PolicyError(
            f"{source}: no tensor is named as routed experts are (...layers.N...experts.M.w1, .gate_proj, or "
            "...experts.gate_up_proj), so there is nothing to pack",
            field="source",
        )
    example = next(iter(found.values())).at
    for layer in model.expert_layers:
        for expert in range(model.experts) if recipe.quantizes_experts(layer) else ():
            for projection in _PROJECTIONS:
                module = example.named(layer, expert, projection)
                if module not in found:
                    raise PolicyError(f"{source}: tensor '{module}.weight' is missing", field=f"{module}.weight")
    return found


def _matrices_of(source: Path, name: str, info: TensorInfo, model: ModelShape) -> list[_Matrix]:
    """The experts' matrices that one tensor of the source holds."""
    at = expert_names.parse(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if at is not None and len(info.shape) == 2:
        return [_Matrix(at, name, info)]
    fused = expert_names.parse_fused(name)
    if fused is None:
        return []
    count = len(fused.projections)
    if len(info.shape) != 3 or info.shape[0] != model.experts or info.shape[1] % count:
        raise PolicyError(
            f"{source}: tensor {name!r} has shape {list(info.shape)}, expected {model.experts} experts with their "
            f"{' and '.join(fused.projections)} rows",
            field=name,
        )
    rows = info.shape[1] // count
    return [
        _Matrix(fused.matrix(expert, projection), name, info, (expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(info.shape[0])
        for i, projection in enumerate(fused.projections)
    ]
