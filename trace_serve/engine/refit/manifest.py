"""What an update has to look like: the names, dtypes and shapes of the checkpoint that the engine was started from.

Everything is checked before the first weight is written, because there is no way back afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trace_serve.errors import ConfigError, PolicyError, ShapeError
from trace_serve.policy.expert_names import parse
from trace_serve.policy.weights import read_weights

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_SHOWN = 3
_WEIGHT = ".weight"


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
        """Reads headers only.

        Raises:
            PolicyError: as `policy.weights.read_weights`, or a dtype that no engine loads.
        """
        tensors = {}
        for name, info in read_weights(directory).items():
            if info.dtype not in _DTYPES:
                raise PolicyError(f"{directory}: tensor {name!r} has dtype {info.dtype}", field=info.file)
            tensors[name] = (_DTYPES[info.dtype], info.shape)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        embedding = "model.embed_tokens.weight"
        tied = config.get("tie_word_embeddings") and embedding in tensors and "lm_head.weight" not in tensors
        return cls(tensors, {"lm_head.weight": embedding} if tied else {})

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


def check_directory(manifest: Manifest, directory: Path, recipe_id: str, progress: Callable[[], None]) -> None:
    """Checks that a directory holds exactly the model's tensors, complete and finite; reads all of them once.

    Args:
        manifest: of the model.
        directory: a Hugging Face model directory, or a policy.
        recipe_id: of the engine; a policy under another recipe is refused.
        progress: called after every tensor.

    Raises:
        PolicyError: missing, truncated or inconsistent files, tensors missing, or a policy of another recipe.
        ConfigError, ShapeError: as `Manifest.check`.
    """
    _check_policy(directory, recipe_id)
    infos = read_weights(directory)
    missing = manifest.missing(infos)
    if missing:
        raise PolicyError(
            f"{directory}: {len(missing)} of the model's {len(manifest.tensors)} tensors are not there "
            f"({', '.join(missing[:_SHOWN])}); expected all of them",
            field="model_path",
        )
    by_file: dict[str, list[str]] = {}
    for name, info in infos.items():
        by_file.setdefault(info.file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(directory / file, framework="pt") as handle:
                for name in names:
                    manifest.check([(name, handle.get_tensor(name))])
                    progress()
        except (OSError, SafetensorError) as exc:
            raise PolicyError(f"{directory / file}: cannot be read: {exc}", field=file) from exc


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
            f"{directory}: its recipe is {found}, this engine runs {recipe_id}; start an engine with the policy's recipe",
            field="model_path",
        )
