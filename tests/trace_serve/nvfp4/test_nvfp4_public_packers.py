"""Other projects' NVFP4 packers on the same data: equal where the recipe names their choices.

Where they differ, the name of the test says in which choice.
"""

import importlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from trace_serve.nvfp4 import (
    e2m1,
    e4m3,
    pack,
    quantize,
    quantize_tokens,
    quantize_weight,
    swizzle,
    token_global_scale,
    unpack,
    unpack_values,
)
from trace_serve.recipe import Recipe

MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def load(module: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    """fp32 [256, 128] holding BF16 values over six decades, with two blocks of zeros and one that underflows."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(256, 128, generator=generator) * torch.logspace(-2, 2, 256).unsqueeze(1)
    x[7, 32:64] = 0
    x[8, 16:32] = 2.0**-40
    return x.to(torch.bfloat16).float()


# FlashInfer's Python reference, the one its kernels are tested with.


@pytest.fixture(scope="module")
def flashinfer_quantize():
    return load("flashinfer.trace.templates.quantize")._nvfp4_quantize_reference


def flashinfer_recipe() -> Recipe:
    return Recipe(scale_formula="amax_over_six", reciprocal="divide")


def is_tie(x: torch.Tensor, scales: torch.Tensor, g: float) -> torch.Tensor:
    decoded = e4m3.decode(scales).repeat_interleave(16, dim=-1) * g
    return torch.isin((x / decoded).abs(), MIDPOINTS)


def test_flashinfer_reference_is_equal_but_for_ties_and_zero_block_under_a_power_of_two(data, flashinfer_quantize):
    g = 2.0**-4
    packed, scales = flashinfer_quantize(data, torch.tensor(1 / g))
    q = quantize(data, g, flashinfer_recipe())
    assert torch.equal(scales.view(torch.uint8), q.scales)
    theirs, ours = unpack(packed), unpack(q.codes)
    zero_block = q.scales.repeat_interleave(16, dim=-1) == 0
    ties = is_tie(data, q.scales, g)
    differs = theirs != ours
    assert not (differs & ~ties & ~zero_block).any()
    # The reference breaks ties downward, where the kernel that it stands for rounds them to even.
    assert (differs & ties).any()
    assert ((ours & 7).int() - (theirs & 7).int())[differs & ties].eq(1).all()
    assert (e2m1.decode(theirs)[zero_block].abs() * 0 == e2m1.decode(ours)[zero_block].abs()).all()


def test_flashinfer_reference_has_another_scale_formula_than_its_kernels(data, flashinfer_quantize):
    recipe = Recipe(activation_global_scale="per_token")
    differing = {"amax_over_six": 0, "amax_times_sixth": 0}
    for row in data[16:]:
        scale = token_global_scale(row, recipe)
        _, scales = flashinfer_quantize(row.unsqueeze(0), scale.encode)
        for formula in differing:
            named = Recipe(activation_global_scale="per_token", scale_formula=formula)
            differing[formula] += int(
                (quantize_tokens(row.unsqueeze(0), named).scales != scales.view(torch.uint8)).sum()
            )
    assert differing["amax_over_six"] == 0
    assert differing["amax_times_sixth"] > 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (127, 5), (128, 4), (300, 36), (130, 22)])
def test_flashinfer_reads_our_128x4_scales(rows, columns):
    read = load("flashinfer.trace.templates.gemm")._unswizzle_sf_128x4
    scales = torch.randint(0, 127, (rows, columns), dtype=torch.uint8)
    assert torch.equal(read(swizzle(scales, "128x4", fill=0x7F), rows, columns), scales)


# compressed-tensors, which vLLM's and llm-compressor's checkpoints are written with.


@pytest.fixture(scope="module")
def compressed_tensors():
    arguments = load("compressed_tensors.quantization").QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        symmetric=True,
        dynamic=False,
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    helpers = load("compressed_tensors.quantization.utils.helpers")
    forward = load("compressed_tensors.quantization.lifecycle.forward")
    pack_codes = load("compressed_tensors.compressors.nvfp4.helpers")

    def quantize_with(x: torch.Tensor, encode: torch.Tensor):
        blocks = x.reshape(x.shape[0], -1, 16)
        scales, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=encode)
        values = forward.quantize(x.clone(), scales, None, arguments, global_scale=encode)
        return pack_codes.pack_fp4_to_uint8(values), scales.to(torch.float8_e4m3fn).view(torch.uint8)

    return quantize_with


@pytest.mark.parametrize("log2", [-6, -2])
def test_compressed_tensors_is_equal_but_for_zero_block_and_signed_zero_under_a_power_of_two(
    data, compressed_tensors, log2
):
    packed, scales = compressed_tensors(data, torch.tensor([2.0**-log2]))
    q = quantize(data, 2.0**log2, flashinfer_recipe())
    zero_block = q.scales == 0
    assert torch.equal(scales[~zero_block], q.scales[~zero_block])
    # It writes 0.125 where a scale is zero; both read back as zeros.
    assert zero_block.any()
    assert (scales[zero_block] == 0x20).all()
    wide = zero_block.repeat_interleave(16, dim=-1)
    assert torch.equal(unpack_values(packed)[~wide], unpack_values(q.codes)[~wide])
    assert not unpack_values(packed)[wide].any()


def test_compressed_tensors_differs_from_the_kernels_in_scale_formula_under_an_fp32_scale(data, compressed_tensors):
    amax = data.abs().max()
    encode = torch.tensor(2688.0) / amax
    _, scales = compressed_tensors(data, encode.reshape(1))
    options = {"operand": "weights", "encode_scale": encode}
    named = quantize(data, encode.reciprocal(), Recipe(weight_scale_formula="amax_over_six"), **options)
    kept = named.scales != 0
    assert torch.equal(scales[kept], named.scales[kept])


def test_compressed_tensors_unpacks_what_we_pack():
    unpack_theirs = load("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(8, 32)
    packed = pack(unpack(codes))
    assert torch.equal(unpack_theirs(packed, 8, 64).float(), unpack_values(packed))


# ModelOpt, in a process of its own, since importing it changes other libraries.

_MODELOPT = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
x = torch.from_numpy(np.load(sys.argv[1]))
q, scales, g = NVFP4QTensor.quantize(x, 16)
np.savez(sys.argv[2], codes=q._quantized_data.numpy(), scales=scales.view(torch.uint8).numpy(), g=g.numpy())
"""


@pytest.fixture(scope="module")
def modelopt_packed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modelopt")
    np.save(folder / "x.npy", data.numpy())
    arguments = [sys.executable, "-c", _MODELOPT, str(folder / "x.npy"), str(folder / "q.npz")]
    subprocess.run(arguments, check=True, capture_output=True, timeout=300)
    return {name: torch.from_numpy(array) for name, array in np.load(folder / "q.npz").items()}


def test_modelopt_weights_are_equal_under_its_scale_formula_reciprocal_and_zero_block(data, modelopt_packed):
    recipe = Recipe(
        weight_global_scale="per_expert", weight_scale_formula="amax_over_six_g", reciprocal="divide", zero_block="one"
    )
    q = quantize_weight(data, recipe)
    assert q.global_scale.unique().item() == modelopt_packed["g"].item()
    assert torch.equal(q.scales, modelopt_packed["scales"])
    assert torch.equal(q.codes, modelopt_packed["codes"])


@pytest.mark.parametrize(
    ("choice", "value"),
    [("weight_scale_formula", "amax_times_sixth"), ("reciprocal", "exact"), ("zero_block", "zero")],
)
def test_modelopt_weights_differ_when_one_choice_of_the_recipe_differs(data, modelopt_packed, choice, value):
    choices = {"weight_scale_formula": "amax_over_six_g", "reciprocal": "divide", "zero_block": "one", choice: value}
    q = quantize_weight(data, Recipe(weight_global_scale="per_expert", **choices))
    same = torch.equal(q.scales, modelopt_packed["scales"]) and torch.equal(q.codes, modelopt_packed["codes"])
    assert not same
