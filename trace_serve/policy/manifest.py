"""`policy.json` and the checked view of a policy directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trace_serve.errors import PolicyError
from trace_serve.policy.contents import check_contents
from trace_serve.policy.digest import digest_directory
from trace_serve.policy.layouts import BF16, detect
from trace_serve.policy.model import ModelShape, check_recipe_fits
from trace_serve.policy.packed import check_packed, check_unpacked
from trace_serve.policy.tokenizer import chat_template_digest, read_json_object, tokenizer_digest
from trace_serve.policy.weights import TensorInfo, read_weights
from trace_serve.recipe import Recipe

MANIFEST_FILE = "policy.json"
SCHEMA_VERSION = 1

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Manifest(BaseModel):
    """The contents of policy.json; unknown keys and values of another type are refused.

    `format` is what the experts' weights are on disk. Where they are packed, `files_digest` is the digest of every file
    but policy.json (`base_digest` is that of what the policy was built from), and `packed_by` says whether policy build
    packed them under the recipe, or they came packed in the source and the recipe cannot vouch for how.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    name: Label
    version: Label
    recipe: dict[str, Any]
    recipe_id: Digest
    base_digest: Digest
    source_run: str | None
    tokenizer_digest: Digest
    chat_template_digest: Digest
    format: Literal["bf16", "modelopt", "compressed-tensors"] = "bf16"
    files_digest: Digest | None = None
    packed_by: Literal["recipe", "source"] | None = None


@dataclass(frozen=True)
class Policy:
    """A policy directory whose manifest, weights, tokenizer and recipe have been checked against each other."""

    path: Path
    manifest: Manifest
    recipe: Recipe
    model_config: dict[str, Any] = field(repr=False)
    model: ModelShape
    weights: dict[str, TensorInfo] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """`digest_directory` of the whole policy; read once, on first use."""
        return digest_directory(self.path)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def version(self) -> str:
        return self.manifest.version

    @property
    def recipe_id(self) -> str:
        return self.manifest.recipe_id

    @property
    def base_digest(self) -> str:
        return self.manifest.base_digest

    @property
    def tokenizer_digest(self) -> str:
        return self.manifest.tokenizer_digest

    @property
    def chat_template_digest(self) -> str:
        return self.manifest.chat_template_digest

    @property
    def format(self) -> str:
        return self.manifest.format

    @property
    def source_run(self) -> str | None:
        return self.manifest.source_run

    @property
    def weight_bytes(self) -> int:
        return sum(info.nbytes for info in self.weights.values())


def parse_manifest(raw: Any, where: str) -> Manifest:
    """Validates parsed JSON as a manifest; `where` names the file in errors.

    Raises:
        PolicyError: naming the first key at fault.
    """
    try:
        return Manifest.model_validate(raw)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or MANIFEST_FILE
        raise PolicyError(f"{where} {key}: {first['msg']}", field=key) from exc


def load_policy(path: Path | str) -> Policy:
    """Opens a policy directory and checks everything that can be checked without reading the weights' data.

    Raises:
        PolicyError: no or bad policy.json; a file that is no part of a policy; a recipe that does not hash to recipe_id
            or does not fit the model; a tokenizer or chat template that differs from its recorded digest; weights that
            are missing, truncated or inconsistent, of another format than policy.json says, or packed otherwise than
            the recipe says.
        RecipeError: an unknown choice in the recipe.
    """
    root = Path(path)
    if not (root / MANIFEST_FILE).is_file():
        raise PolicyError(
            f"{root}: no {MANIFEST_FILE}, expected a policy directory; make one with `trace-serve policy build`",
            field=str(root),
        )
    check_contents(root)
    manifest = parse_manifest(read_json_object(root / MANIFEST_FILE), str(root / MANIFEST_FILE))
    recipe = Recipe.from_dict(manifest.recipe)
    _check_equal(root, "recipe_id", recipe.recipe_id, manifest.recipe_id)
    _check_equal(root, "tokenizer_digest", tokenizer_digest(root), manifest.tokenizer_digest)
    _check_equal(root, "chat_template_digest", chat_template_digest(root), manifest.chat_template_digest)
    config = read_json_object(root / "config.json")
    model = ModelShape.from_config(config)
    check_recipe_fits(recipe, model)
    weights = read_weights(root)
    _check_format(root, manifest, recipe, model, weights)
    return Policy(root, manifest, recipe, config, model, weights)


def _check_format(
    root: Path, manifest: Manifest, recipe: Recipe, model: ModelShape, weights: dict[str, TensorInfo]
) -> None:
    declared = detect(root)
    _check_equal(root, "format", BF16 if declared is None else declared.layout.name, manifest.format)
    if declared is None:
        check_unpacked(root, weights)
    else:
        check_packed(root, weights, declared, recipe, model)


def _check_equal(root: Path, key: str, got: str, recorded: str) -> None:
    if got != recorded:
        raise PolicyError(
            f"{root}: {key} is {got}, {MANIFEST_FILE} says {recorded}; restore the file or build the policy again",
            field=key,
        )
