"""Making a policy directory from a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from trace_serve.errors import PolicyError
from trace_serve.policy.digest import digest_directory, list_files
from trace_serve.policy.layouts import BF16, CONFIG_FILE, FORMATS, LAYOUTS, MODELOPT_FILE, Layout, detect
from trace_serve.policy.manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest, Policy, load_policy, parse_manifest
from trace_serve.policy.model import ModelShape, check_recipe_fits
from trace_serve.policy.packed import check_packed
from trace_serve.policy.quantization_config import config_files
from trace_serve.policy.storable import check_storable
from trace_serve.policy.tokenizer import chat_template_digest, read_json_object, tokenizer_digest
from trace_serve.policy.weights import INDEX_FILE, TensorInfo, read_weights
from trace_serve.recipe import Recipe


def build_policy(
    source: Path | str,
    out: Path | str,
    *,
    name: str,
    version: str,
    recipe: Recipe,
    source_run: str | None = None,
    weights: str = BF16,
    progress: Callable[[str], None] | None = None,
) -> Policy:
    """Copies a model directory and adds policy.json.

    With `weights` `bf16` experts stay BF16 and are quantized when an engine loads them. With `modelopt` or
    `compressed-tensors` they are packed under the recipe here, to the very codes that an engine would make; a source
    that is packed in that layout already is copied as it is.

    `out` appears complete or not at all. Building the same policy again returns the existing one.

    Args:
        source: model directory with config.json, safetensors weights and tokenizer files.
        out: directory to create; its parent must exist.
        name: letters, digits, dot, dash and underscore, at most 64.
        version: as `name`.
        recipe: the numeric choices to serve under.
        source_run: the training run that produced the weights, free text.
        weights: what the experts' weights are to be on disk: `bf16`, `modelopt` or `compressed-tensors`.
        progress: called with one line before each shard is packed, and with what was lost.

    Raises:
        PolicyError: the model is incomplete or of an unsupported architecture; the recipe does not fit it, or the
            format cannot carry the recipe; the source is packed in another layout; a weight is not finite; or `out`
            exists and is something else.
    """
    root, target = Path(source), Path(out)
    if weights not in FORMATS:
        raise PolicyError(f"format: got {weights!r}, expected one of {', '.join(FORMATS)}", field="format")
    if (root / MANIFEST_FILE).exists():
        raise PolicyError(f"{root}: already has {MANIFEST_FILE}, expected a plain model directory", field="source")
    files = list_files(root)
    model = ModelShape.from_config(read_json_object(root / CONFIG_FILE))
    check_recipe_fits(recipe, model)
    tensors = read_weights(root)
    layout = _layout_to_write(root, tensors, recipe, model, weights)
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
            "format": weights,
            "packed_by": None if weights == BF16 else "source" if layout is None else "recipe",
        },
        "policy",
    )
    if target.exists():
        return _existing(target, manifest)
    if not target.parent.is_dir():
        raise PolicyError(f"{target}: its parent directory does not exist; create it first", field="out")
    if root.resolve() in target.resolve().parents:
        raise PolicyError(f"{target}: is inside the source directory {root}; choose another place", field="out")
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if layout is None:
            _copy(root, files, temporary)
            if digest_directory(temporary) != manifest.base_digest:
                raise _changed(root)
        else:
            _pack(root, files, temporary, layout, tensors, recipe, model, progress)
            if digest_directory(root) != manifest.base_digest:
                raise _changed(root)
        if weights != BF16:
            manifest = manifest.model_copy(update={"files_digest": digest_directory(temporary)})
        text = json.dumps(manifest.model_dump(), indent=2, sort_keys=True) + "\n"
        (temporary / MANIFEST_FILE).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return load_policy(target)


def _layout_to_write(
    root: Path, tensors: dict[str, TensorInfo], recipe: Recipe, model: ModelShape, weights: str
) -> Layout | None:
    """The layout to pack into; None where the source's files are copied."""
    declared = detect(root)
    if declared is None:
        if weights == BF16:
            return None
        layout = LAYOUTS[weights]
        check_storable(recipe, layout)
        return layout
    if declared.layout.name != weights:
        raise PolicyError(
            f"{root}: its weights are {declared.layout.name} already, got format {weights}; choose format "
            f"{declared.layout.name}, which copies them, or start from the BF16 model",
            field="format",
        )
    check_packed(root, tensors, declared, recipe, model)
    return None


def _existing(target: Path, manifest: Manifest) -> Policy:
    policy = load_policy(target)
    found = policy.manifest.model_copy(update={"files_digest": None})
    if found != manifest:
        differing = [key for key, value in manifest if getattr(found, key) != value]
        raise PolicyError(
            f"{target}: exists and is another policy ({', '.join(differing)} differ); choose another --out", field="out"
        )
    recorded = policy.manifest.files_digest or manifest.base_digest
    if digest_directory(target, exclude=(MANIFEST_FILE,)) != recorded:
        raise PolicyError(f"{target}: exists and its files were altered; remove it and build again", field="out")
    return policy


def _changed(root: Path) -> PolicyError:
    return PolicyError(f"{root}: changed while it was copied; try again when nothing writes to it", field="source")


def _copy(root: Path, files: list[Path], out: Path) -> None:
    for path in files:
        destination = out / path.relative_to(root)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)


def _pack(
    root: Path,
    files: list[Path],
    out: Path,
    layout: Layout,
    tensors: dict[str, TensorInfo],
    recipe: Recipe,
    model: ModelShape,
    progress: Callable[[str], None] | None,
) -> None:
    try:
        from trace_serve.checkpoints.writer import PackedWriter
    except ModuleNotFoundError as exc:
        raise PolicyError(
            f"format {layout.name}: packing weights needs {exc.name}; run `pip install 'trace-serve[engine]'`",
            field="format",
        ) from exc
    written = {INDEX_FILE, CONFIG_FILE, MODELOPT_FILE, *(info.file for info in tensors.values())}
    writer = PackedWriter(root, tensors, layout, recipe, model)
    _copy(root, [path for path in files if path.relative_to(root).as_posix() not in written], out)
    writer.write(out, progress)
    config = read_json_object(root / CONFIG_FILE)
    for file, content in config_files(config, layout, tensors, recipe, model.attention_layers).items():
        (out / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
