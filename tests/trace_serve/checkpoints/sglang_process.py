"""What SGLang's own NVFP4 methods make of packed policies, in a process of its own: `python FILE MODELOPT PACKED`.

Prints, for each of the two layouts, the parameters that the method creates for a layer of experts, the tensors of one
expert under the parameter they are loaded into, and the modules that the config leaves out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expert_model import EXPERTS, HIDDEN, INTERMEDIATE, read_tensors

FUSED = (
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.1.mlp.gate",
    "lm_head",
    "model.layers.0.mlp.experts",
    "model.layers.1.mlp.experts",
)
"""Names that SGLang asks for: attention fused, experts of a layer as one module."""


def run_sglang(modelopt: Path, packed: Path) -> dict[str, Any]:
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, str(modelopt), str(packed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _described(tensor: Any) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape)]


def _parameters(method: Any) -> dict[str, Any]:
    import torch

    layer: Any = torch.nn.Module()
    layer.num_local_experts = layer.num_experts = EXPERTS
    layer.moe_runner_config = SimpleNamespace(is_gated=True, intermediate_size_per_partition=INTERMEDIATE)
    method.create_weights(layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16, weight_loader=lambda *_, **__: None)
    return {name: _described(parameter) for name, parameter in layer.named_parameters()}


def _stored(directory: Path) -> dict[str, Any]:
    """Tensors of expert 0 of layer 1 by the parameter that SGLang loads them into."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", num_experts=1)
    prefix = "model.layers.1.mlp."
    out = {}
    for name, tensor in read_tensors(directory).items():
        for parameter, checkpoint, _, shard in mapping:
            if name.startswith(prefix + checkpoint):
                loaded = name.removeprefix(prefix).replace(checkpoint, parameter).removeprefix("experts.")
                out[f"{loaded} {shard}"] = _described(tensor)
    return out


def _section(directory: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return section


def main(modelopt: Path, packed: Path) -> None:
    warnings.simplefilter("ignore")
    import torch
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe import (
        CompressedTensorsW4A4Nvfp4MoE,
    )
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptNvFp4FusedMoEMethod

    # Their constructors refuse a machine without a Blackwell card; what they create does not depend on one.
    config = ModelOptFp4Config.from_config(_section(modelopt))
    method = object.__new__(ModelOptNvFp4FusedMoEMethod)
    method.quant_config, method.enable_flashinfer_trtllm_moe = config, False
    method.use_flashinfer_trtllm_weight_layout = False
    scheme = object.__new__(CompressedTensorsW4A4Nvfp4MoE)
    scheme.group_size, scheme.use_flashinfer_trtllm = 16, False
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    theirs = CompressedTensorsConfig.from_config({**_section(packed), "packed_modules_mapping": fused})

    def ignored(name: str) -> bool:
        module = f"{name}.0.gate_proj" if name.endswith("experts") else name
        return theirs.get_scheme_dict(torch.nn.Linear(1, 1), module) is None

    expert = theirs.get_scheme_dict(torch.nn.Linear(1, 1), f"{FUSED[-1]}.0.gate_proj")
    found = {
        "modelopt": {
            "parameters": _parameters(method),
            "stored": _stored(modelopt),
            "left_out": [name for name in FUSED if config.is_layer_excluded(name)],
            "serialized": config.is_checkpoint_nvfp4_serialized and config.group_size == 16,
        },
        "compressed-tensors": {
            "parameters": _parameters(scheme),
            "stored": _stored(packed),
            "left_out": [name for name in FUSED if ignored(name)],
            "serialized": bool(theirs._is_fp4a4_nvfp4(expert["weights"], expert["input_activations"])),
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
