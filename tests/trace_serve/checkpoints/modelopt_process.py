"""NVIDIA ModelOpt in a process of its own, which its import takes over (warnings, CUDA_HOME): `python FILE JOB`.

JOB is JSON: `read` maps output files to policy directories, whose packed experts are dequantized into them; `write`
maps output files to safetensors files of BF16 matrices, quantized into ModelOpt's tensors; `convert` is a list
of hf_quant_config.json contents, printed as the quantization_config that ModelOpt's exporter derives from each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_modelopt(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a job; returns the converted configs."""
    command = [sys.executable, __file__, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    converted: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return converted


def main(job: dict[str, Any]) -> None:
    import torch
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    from safetensors.torch import load_file, save_file

    for out, directory in job["read"].items():
        tensors = {}
        for path in Path(directory).glob("*.safetensors"):
            tensors |= load_file(path)
        values = {}
        for name, scale in tensors.items():
            if not name.endswith(".weight_scale"):
                continue
            module = name.removesuffix(".weight_scale")
            codes = tensors[f"{module}.weight"]
            shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
            values[module] = NVFP4QTensor(shape, torch.float32, codes).dequantize(
                torch.float32, scale=scale, double_scale=tensors[f"{module}.weight_scale_2"], block_sizes={-1: 16}
            )
        save_file(values, out)
    for out, source in job["write"].items():
        packed = {}
        for module, weight in load_file(source).items():
            # A power of two above ModelOpt's own scale, as a calibration that snaps scales would store.
            own = NVFP4QTensor.get_weights_scaling_factor_2(weight)
            g = torch.exp2(torch.ceil(torch.log2(own)))
            quantized, scale, _ = NVFP4QTensor.quantize(weight.clone(), 16, weights_scaling_factor_2=g)
            packed[f"{module}.weight"] = quantized._quantized_data
            packed[f"{module}.weight_scale"] = scale
            packed[f"{module}.weight_scale_2"] = g
            packed[f"{module}.values"] = quantized.dequantize(
                torch.bfloat16, scale=scale, double_scale=g, block_sizes={-1: 16}
            )
        save_file(packed, out)
    print(json.dumps([convert_hf_quant_config_format(config) for config in job["convert"]]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
