"""Compares what the plugs rely on in trainers that do not install here with the newest wheels on PyPI.

    python tools/check_plugs.py [--write] [WHEEL ...]

Names and signatures are read from a wheel's source text; nothing of it is run or installed. Without wheels they are
downloaded. Differences from tests/trace_serve/guided/plug_contracts.json end with exit code 1; --write records them.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent.parent / "tests/trace_serve/guided/plug_contracts.json"

USES: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer_engine": {
        "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py": (
            "NVFP4QuantizerRef.__init__",
            "NVFP4QuantizerRef._quantize",
            "NVFP4QuantizerRef.quantize",
            "NVFP4QuantizerRef.qgemm",
        ),
        "transformer_engine/pytorch/custom_recipes/reference_utils.py": ("Fp4Formats.E2M1",),
        "transformer_engine/pytorch/quantization.py": (
            "QuantizerRole.module_type",
            "QuantizerRole.tensor_type",
            "QuantizerRole.name",
        ),
        "transformer_engine/common/recipe/__init__.py": ("CustomRecipe.qfactory",),
    },
    "megatron_core": {
        "megatron/core/transformer/transformer_config.py": (
            "TransformerConfig.fp4_recipe",
            "TransformerConfig.fp4_quantizer_factory",
        ),
        "megatron/core/fp8_utils.py": ("_get_custom_recipe",),
        "megatron/core/transformer/moe/token_dispatcher.py": (
            "MoEAllGatherTokenDispatcher.reversed_local_input_permutation_mapping",
            "MoEAlltoAllTokenDispatcher.reversed_local_input_permutation_mapping",
        ),
    },
    "verl": {
        "verl/workers/engine/fsdp/transformer_impl.py": (
            "FSDPEngine._build_fsdp_module",
            "FSDPEngine.use_ulysses_sp",
            "FSDPEngine.engine_config",
            "FSDPEngineWithLMHead.prepare_model_inputs",
        ),
        "verl/workers/engine/base.py": ("EngineRegistry.register",),
        "verl/workers/config/engine.py": ("EngineConfig.forward_only", "FSDPEngineConfig.qat"),
        "verl/utils/tensordict_utils.py": ("get",),
    },
}
"""Wheel, file and names: functions and methods by their parameters, attributes by being assigned."""


def describe(source: str, names: tuple[str, ...]) -> dict[str, str | None]:
    """Each name's parameters, `attribute`, or None where the source has none of that name."""
    return {name: _found(ast.parse(source), name.split(".")) for name in names}


def _found(tree: Any, path: list[str]) -> str | None:
    *scopes, name = path
    for scope in scopes:
        tree = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == scope), None)
        if tree is None:
            return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node.args)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found = node.id if isinstance(node, ast.Name) else node.attr
            if found == name:
                return "attribute"
    return None


def read(wheel: Path) -> tuple[str, dict[str, Any]]:
    """The package of a wheel, and what it has of the names in `USES`."""
    package, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        files = {path: describe(archive.read(path).decode(), names) for path, names in USES[package].items()}
    return package, {"version": version, "files": files}


def download(into: Path) -> list[Path]:
    for package in USES:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(into), package], check=True)
    return sorted(into.glob("*.whl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="record what the wheels have")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = dict(read(wheel) for wheel in options.wheels or download(Path(directory)))
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.write:
        RECORD.write_text(json.dumps({**recorded, **found}, indent=2, sort_keys=True) + "\n")
        return 0
    differs = False
    for package, each in found.items():
        for path, names in each["files"].items():
            for name, description in names.items():
                before = recorded.get(package, {}).get("files", {}).get(path, {}).get(name)
                if description != before:
                    differs = True
                    print(f"{package} {each['version']} {path} {name}: got {description}, recorded {before}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
