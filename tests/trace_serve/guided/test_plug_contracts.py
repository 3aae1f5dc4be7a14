"""What the plugs for trainers that do not install here rely on is what the trainers' wheels were recorded to have."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from trace_serve.guided.plugs import transformer_engine, verl

ROOT = Path(__file__).parents[3]
RECORD = json.loads((Path(__file__).parent / "plug_contracts.json").read_text())


def checker() -> Any:
    spec = importlib.util.spec_from_file_location("check_plugs", ROOT / "tools/check_plugs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(package: str, name: str) -> str:
    found = [names[name] for names in RECORD[package]["files"].values() if name in names]
    assert len(found) == 1
    return str(found[0])


def test_every_name_that_a_plug_uses_was_found_in_its_wheel() -> None:
    uses = {package: {path: set(names) for path, names in files.items()} for package, files in checker().USES.items()}
    have = {package: {path: set(names) for path, names in each["files"].items()} for package, each in RECORD.items()}
    assert have == uses
    for each in RECORD.values():
        assert all(found is not None for names in each["files"].values() for found in names.values())


@pytest.mark.parametrize(
    ("method", "package", "name"),
    [
        (transformer_engine.Hinted._quantize, "transformer_engine", "NVFP4QuantizerRef._quantize"),
        (verl.Hinted._build_fsdp_module, "verl", "FSDPEngine._build_fsdp_module"),
        (verl.Hinted.prepare_model_inputs, "verl", "FSDPEngineWithLMHead.prepare_model_inputs"),
    ],
)
def test_what_a_plug_overrides_has_the_parameters_of_the_original(method: Any, package: str, name: str) -> None:
    theirs = [part.split(":")[0].strip() for part in recorded(package, name).split(",")]
    assert list(inspect.signature(method).parameters) == theirs


@pytest.mark.parametrize("keyword", ["dtype", "row_scaled_nvfp4"])
def test_the_quantizer_is_built_with_keywords_that_the_original_has(keyword: str) -> None:
    assert f"{keyword}:" in recorded("transformer_engine", "NVFP4QuantizerRef.__init__")


def test_a_wheels_source_is_described_without_running_it() -> None:
    source = (
        "raise SystemExit\nclass A(B):\n    x: int = 0\n    def f(self, y: int = 1, **z): self.w = y\ndef g(): ...\n"
    )
    names = ("A.x", "A.f", "A.w", "A.gone", "C.f", "g")
    assert checker().describe(source, names) == {
        "A.x": "attribute",
        "A.f": "self, y: int=1, **z",
        "A.w": "attribute",
        "A.gone": None,
        "C.f": None,
        "g": "",
    }
