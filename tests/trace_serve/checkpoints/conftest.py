from __future__ import annotations

import json

import pytest
from expert_model import expert_weights, write_expert_model
from modelopt_process import run_modelopt
from packed_policies import RECIPES, ByModelOpt, build
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def by_modelopt(tmp_path_factory: pytest.TempPathFactory) -> ByModelOpt:
    root = tmp_path_factory.mktemp("modelopt")
    source = write_expert_model(root / "model")
    policies = {name: build(source, root / name, recipe, "modelopt") for name, recipe in RECIPES.items()}
    nested = [json.loads((path / "hf_quant_config.json").read_text()) for path in policies.values()]
    outputs = {name: root / f"{name}.safetensors" for name in RECIPES}
    save_file(expert_weights("qwen3_moe"), root / "experts.safetensors")
    written = root / "written.safetensors"
    job = {
        "read": {str(outputs[name]): str(path) for name, path in policies.items()},
        "write": {str(written): str(root / "experts.safetensors")},
        "convert": nested,
    }
    converted = run_modelopt(job)
    return ByModelOpt(
        policies,
        {name: load_file(path) for name, path in outputs.items()},
        dict(zip(RECIPES, converted, strict=True)),
        load_file(written),
    )
