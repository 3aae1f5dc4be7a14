"""Reading a packed checkpoint as the BF16 checkpoint that it stands for, tensor by tensor.

Everything that can be wrong is found before the first tensor is handed out: an engine that is being refitted must not
hold half of a checkpoint when it learns that the rest is damaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_serve.checkpoints import images
from trace_serve.checkpoints.shards import Shards
from trace_serve.errors import PolicyError
from trace_serve.policy.expert_names import parse
from trace_serve.policy.layouts import KV_SCALES, Declared
from trace_serve.policy.packed import PackedModules, check_directory
from trace_serve.policy.weights import TensorInfo
from trace_serve.recipe import Recipe


class PackedCheckpoint:
    """A packed checkpoint whose headers and scales have been checked against a recipe.

    Attributes:
        declared: its layout.
    """

    def __init__(self, directory: Path, declared: Declared, modules: PackedModules) -> None:
        self.declared = declared
        self._directory = directory
        self._modules = modules

    def expand(self, tensors: Iterable[tuple[str, Tensor]], on_image: Callable[[str, Tensor], None]) -> Iterator[Any]:
        """Turns packed tensors into BF16 ones and passes all others on.

        Holds no more than the parts of matrices that are still incomplete, so memory stays bounded where the parts of a
        matrix follow each other.

        Args:
            tensors: (name, tensor) of the whole checkpoint, in any order.
            on_image: called with the module's name and the image, before it is handed out.

        Yields:
            (name, tensor), a packed module as `<module>.weight` BF16 [N, K].

        Raises:
            PolicyError: the tensors are not those that were checked.
        """
        layout = self.declared.layout
        waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            module, _, part = name.rpartition(".")
            if part in KV_SCALES:
                continue
            if module not in self._modules:
                yield name, tensor
                continue
            if part not in layout.required:
                continue
            waiting[module][part] = tensor
            if len(waiting[module]) == len(layout.required):
                whole = images.image(module, layout, waiting.pop(module))
                on_image(module, whole)
                yield f"{module}.weight", whole
        if waiting:
            module, parts = next(iter(waiting.items()))
            absent = next(part for part in layout.required if part not in parts)
            raise PolicyError(f"{self._directory}: tensor '{module}.{absent}' was not read", field=f"{module}.{absent}")

    def check_data(self, recipe: Recipe) -> None:
        """Reads every scale, and codes where exactness depends on them.

        Raises:
            PolicyError: naming the tensor: a scale that is NaN, negative or not positive; a global scale with which
                BF16 cannot hold the weights; a stored input scale that is not the recipe's static one; or naming a
                shard that cannot be read.
        """
        layout = self.declared.layout
        with Shards(self._directory) as shards:
            for module, parts in self._modules.items():
                images.check_scales(module, layout, shards.read(f"{module}.{layout.scales}", parts[layout.scales]))
                name = f"{module}.{layout.global_scale}"
                g = images.decode_scale(name, layout, shards.read(name, parts[layout.global_scale]))
                if not images.is_power_of_two(g):
                    whole = {part: shards.read(f"{module}.{part}", parts[part]) for part in layout.required}
                    images.image(module, layout, whole)
                self._check_input_scale(module, parts, recipe, shards)

    def _check_input_scale(self, module: str, parts: dict[str, TensorInfo], recipe: Recipe, shards: Shards) -> None:
        if recipe.experts != "w4a4" or recipe.activation_global_scale != "per_tensor_static":
            return
        layout = self.declared.layout
        matrix = parse(module)
        assert matrix is not None
        of_layer = recipe.experts_mid_scale if matrix.projection == "down" else recipe.experts_in_scale
        expected = of_layer(matrix.layer)
        name = f"{module}.{layout.input_scale}"
        if layout.input_scale not in parts:
            raise PolicyError(f"{self._directory}: tensor {name!r} is missing; the recipe's is {expected}", field=name)
        found = images.decode_scale(name, layout, shards.read(name, parts[layout.input_scale]))
        if torch.tensor(found, dtype=torch.float32) != torch.tensor(expected, dtype=torch.float32):
            raise PolicyError(
                f"{self._directory}: tensor {name!r} stands for an input scale of {found:.8g}, the recipe says "
                f"{expected}; give the recipe the checkpoint's scales, or build the policy again",
                field=name,
            )


def open_checkpoint(directory: Path | str, recipe: Recipe) -> PackedCheckpoint | None:
    """Checks a model directory, headers and scales, for an engine that serves it under `recipe`.

    Returns:
        The packed checkpoint, or None where weights are not packed.

    Raises:
        PolicyError: a shard is truncated or missing (the file is named); a tensor of a packed checkpoint is missing,
            has the wrong dtype or shape or holds damaged scales (the tensor is named); the checkpoint contradicts the
            recipe; or it is quantized in another way.
    """
    found = check_directory(directory, recipe)
    if found is None:
        return None
    checkpoint = PackedCheckpoint(Path(directory), *found)
    checkpoint.check_data(recipe)
    return checkpoint
