"""What is measured: a policy, or a model under a recipe, read and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trace_serve.errors import ConfigError
from trace_serve.policy.dims import ModelDims, load_dims
from trace_serve.policy.layouts import detect
from trace_serve.policy.manifest import MANIFEST_FILE, load_policy
from trace_serve.policy.model import ModelShape, check_recipe_fits
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.recipe import Recipe


@dataclass(frozen=True)
class Subject:
    """A directory that is both the rollout's model and the trainer's, and the recipe of the rollouts."""

    path: Path
    name: str
    recipe: Recipe
    dims: ModelDims

    def sites(self, *, mid: bool) -> tuple[str, ...]:
        """Where the recipe rounds something that a hint can tell; `mid` includes the experts' second product."""
        experts = ("experts_in", *(("experts_mid",) if mid else ())) if self.recipe.experts == "w4a4" else ()
        return experts + (("k", "v") if self.recipe.kv == "nvfp4" else ())


def open_subject(path: Path, recipe: Recipe | None = None) -> Subject:
    """A policy, or a Hugging Face model, with BF16 weights.

    Args:
        path: its directory.
        recipe: of the rollouts; None is the policy's own, and the default one for a model.

    Raises:
        ConfigError: no model there, packed weights, or a recipe that rounds nothing while serving.
        PolicyError: a damaged policy, or a model that the recipe does not fit.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: no config.json there, expected a policy or a model directory", field="policy")
    if detect(path) is not None:
        raise ConfigError(
            f"{path}: experts are packed on disk, expected BF16; measure the policy that they were built from",
            field="policy",
        )
    name, own = path.resolve().name, Recipe()
    if (path / MANIFEST_FILE).is_file():
        policy = load_policy(path)
        name, own = f"{policy.name}@{policy.version}", policy.recipe
    chosen = own if recipe is None else recipe
    check_recipe_fits(chosen, ModelShape.from_config(read_json_object(path / "config.json")))
    if not chosen.has_hints:
        raise ConfigError(f"{path}: its recipe rounds nothing while serving, so it leaves no hints", field="recipe")
    return Subject(path, name, chosen, load_dims(str(path)))
