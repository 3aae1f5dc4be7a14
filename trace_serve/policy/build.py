"""Making a policy directory from a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from trace_serve.errors import PolicyError
from trace_serve.policy.digest import digest_directory, list_files
from trace_serve.policy.manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest, Policy, load_policy, parse_manifest
from trace_serve.policy.model import ModelShape, check_recipe_fits
from trace_serve.policy.tokenizer import chat_template_digest, read_json_object, tokenizer_digest
from trace_serve.policy.weights import read_weights
from trace_serve.recipe import Recipe


def build_policy(
    source: Path | str, out: Path | str, *, name: str, version: str, recipe: Recipe, source_run: str | None = None
) -> Policy:
    """Copies a model directory and adds policy.json; weights stay BF16 and are quantized at load.

    `out` appears complete or not at all. Building the same policy again returns the existing one.

    Args:
        source: model directory with config.json, safetensors weights and tokenizer files.
        out: directory to create; its parent must exist.
        name: letters, digits, dot, dash and underscore, at most 64.
        version: as `name`.
        recipe: the numeric choices to serve under.
        source_run: the training run that produced the weights, free text.

    Raises:
        PolicyError: the model is incomplete or of an unsupported architecture, the recipe does not fit it, or `out`
            exists and is something else.
    """
    root, target = Path(source), Path(out)
    if (root / MANIFEST_FILE).exists():
        raise PolicyError(f"{root}: already has {MANIFEST_FILE}, expected a plain model directory", field="source")
    files = list_files(root)
    check_recipe_fits(recipe, ModelShape.from_config(read_json_object(root / "config.json")))
    read_weights(root)
    manifest = parse_manifest(
        {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "version": version,
            "recipe": recipe.to_dict(),
            "recipe_id": recipe.recipe_id,
            "base_digest": digest_directory(root),
            "source_run": source_run,
            "tokenizer_digest": tokenizer_digest(root),
            "chat_template_digest": chat_template_digest(root),
        },
        "policy",
    )
    if target.exists():
        return _existing(target, manifest)
    if not target.parent.is_dir():
        raise PolicyError(f"{target}: its parent directory does not exist; create it first", field="out")
    if root.resolve() in target.resolve().parents:
        raise PolicyError(f"{target}: is inside the source directory {root}; choose another place", field="out")
    _copy(root, files, target, manifest)
    return load_policy(target)


def _existing(target: Path, manifest: Manifest) -> Policy:
    policy = load_policy(target)
    if policy.manifest != manifest:
        differing = [key for key, value in manifest if getattr(policy.manifest, key) != value]
        raise PolicyError(
            f"{target}: exists and is another policy ({', '.join(differing)} differ); choose another --out", field="out"
        )
    if _base_digest(target) != manifest.base_digest:
        raise PolicyError(f"{target}: exists and its files were altered; remove it and build again", field="out")
    return policy


def _base_digest(target: Path) -> str:
    """The digest of the policy's files without its manifest, which is the digest of what it was built from."""
    return digest_directory(target, exclude=(MANIFEST_FILE,))


def _copy(root: Path, files: list[Path], target: Path, manifest: Manifest) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for path in files:
            destination = temporary / path.relative_to(root)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)
        if digest_directory(temporary) != manifest.base_digest:
            raise PolicyError(
                f"{root}: changed while it was copied; try again when nothing writes to it", field="source"
            )
        text = json.dumps(manifest.model_dump(), indent=2, sort_keys=True) + "\n"
        (temporary / MANIFEST_FILE).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
