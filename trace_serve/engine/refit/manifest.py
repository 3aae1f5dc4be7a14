"""What an update has to look like: the names, dtypes and shapes of the checkpoint that the engine was started from.

Everything is checked before the first weight is written, because there is no way back afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trace_serve.checkpoints.reader import open_checkpoint
from trace_serve.checkpoints.shards import DTYPES, Shards
from trace_serve.errors import ConfigError, PolicyError, ShapeError
from trace_serve.policy.expert_names import parse
from trace_serve.policy.layouts import KV_SCALES, declares_nvfp4, detect
from trace_serve.policy.packed import packed_modules
from trace_serve.policy.weights import read_weights
from trace_serve.recipe import Recipe

_SHOWN = 3
_WEIGHT = ".weight"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    tensors: dtype and unsharded shape of every tensor of the checkpoint, by name.
    aliases: further names that may be sent and change nothing, with the tensor whose shape they have: a tied head.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_directory(cls, directory: Path) -> Manifest:
        """Reads headers only. Experts of a packed checkpoint are listed as the BF16 matrices that they stand for.

        Raises:
            PolicyError: as `policy.weights.read_weights`, or a dtype that no engine loads.
        """
        infos = read_weights(directory)
        declared = detect(directory) if declares_nvfp4(directory) else None
        packed = {} if declared is None else packed_modules(infos, declared.layout)
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, info in infos.items():
            module, _, part = name.rpartition(".")
            if declared is not None and part in KV_SCALES:
                continue
            if declared is not None and module in packed:
                rows, columns = packed[module][declared.layout.codes].shape
                tensors[f"{module}{_WEIGHT}"] = (torch.bfloat16, (rows, 2 * columns))
            elif info.dtype in DTYPES:
                tensors[name] = (DTYPES[info.dtype], info.shape)
            else:
                raise PolicyError(f"{directory}: tensor {name!r} has dtype {info.dtype}", field=info.file)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tied = config.get("tie_word_embeddings") and _EMBEDDING in tensors and _HEAD not in tensors
        return cls(tensors, {_HEAD: _EMBEDDING} if tied else {})

    def check_metadata(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raises:
        ConfigError: the model has no tensor of that name.
        ShapeError: another dtype or shape than the checkpoint's.
        """
        expected = self.tensors.get(self.aliases.get(name, name))
        if expected is None:
            raise ConfigError(
                f"tensor {name!r}: the model has no tensor of that name; send the names of its checkpoint", field=name
            )
        if dtype != expected[0]:
            raise ShapeError(f"tensor {name!r}: got {dtype}, expected {expected[0]} as in the checkpoint", field=name)
        if tuple(shape) != expected[1]:
            raise ShapeError(f"tensor {name!r}: got shape {tuple(shape)}, expected {expected[1]}", field=name)

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Checks a bucket, values included.

        Raises:
            ConfigError: not (name, tensor) pairs, an unknown name, a name twice, or a value that is not finite.
            ShapeError: as `check_metadata`.
        """
        seen: set[str] = set()
        for name, tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                raise ConfigError(f"tensor {name!r}: got {type(tensor).__name__}, expected a dense tensor", field=name)
            self.check_metadata(name, tensor.dtype, tensor.shape)
            if name in seen:
                raise ConfigError(f"tensor {name!r}: is twice in one bucket, expected once", field=name)
            seen.add(name)
            check_finite(name, tensor)

    def missing(self, received: Iterable[str]) -> list[str]:
        """Tensors of the checkpoint that are not among `received`."""
        have = set(received)
        return [name for name in self.tensors if name not in have]

    def unpaired(self, received: Iterable[str]) -> str | None:
        """A gate or up projection whose other half, with which it shares a global scale, was not received."""
        have = set(received)
        for name in have:
            matrix = parse(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None
            if matrix is not None and matrix.sibling is not None and f"{matrix.sibling}{_WEIGHT}" not in have:
                return name
        return None


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises ConfigError for NaN or infinity in a floating-point tensor."""
    if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ConfigError(
            f"tensor {name!r}: {bad} values are NaN or infinite, expected finite weights; the training step diverged",
            field=name,
        )


def check_directory(manifest: Manifest, directory: Path, recipe: Recipe, progress: Callable[[], None]) -> None:
    """Checks that a directory holds exactly the model's tensors, complete and finite; reads all of them once.

    Args:
        manifest: of the model.
        directory: a Hugging Face model directory, packed or not, or a policy.
        recipe: of the engine; a policy under another recipe is refused.
        progress: called after every tensor.

    Raises:
        PolicyError: missing, truncated or inconsistent files, tensors missing, or a policy of another recipe.
        ConfigError, ShapeError: as `Manifest.check`.
    """
    _check_policy(directory, recipe.recipe_id)
    checkpoint = open_checkpoint(directory, recipe)
    missing = manifest.missing(Manifest.of_directory(directory).tensors)
    if missing:
        raise PolicyError(
            f"{directory}: {len(missing)} of the model's {len(manifest.tensors)} tensors are not there "
            f"({', '.join(missing[:_SHOWN])}); expected all of them",
            field="model_path",
        )
    with Shards(directory) as shards:
        tensors: Iterable[tuple[str, Tensor]] = (
            (name, shards.read(name, info)) for name, info in read_weights(directory).items()
        )
        if checkpoint is not None:
            tensors = checkpoint.expand(tensors, lambda module, image: None)
        for name, tensor in tensors:
            manifest.check([(name, tensor)])
            progress()


def _check_policy(directory: Path, recipe_id: str) -> None:
    path = directory / "policy.json"
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("recipe_id")
    except (OSError, ValueError, AttributeError) as exc:
        raise PolicyError(f"{path}: cannot be read: {exc}", field="model_path") from exc
    if found != recipe_id:
        raise PolicyError(
            f"{directory}: its recipe is {found}, this engine runs {recipe_id}; start an engine with that recipe",
            field="model_path",
        )
