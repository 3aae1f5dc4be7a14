import subprocess
import sys

import pytest
import torch

from trace_serve.errors import ConfigError, ShapeError
from trace_serve.kernels import available, get_kernels
from trace_serve.nvfp4 import e4m3, new_counters, unpack_values

REFERENCE = get_kernels("reference")
CPU = get_kernels("cpu")
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda k: k.name)


def assert_same_rows(x, **options):
    counted, expected_counts = new_counters(), new_counters()
    values, got = CPU.fake_quantize_rows(x, counters=counted, **options)
    expected_values, expected = REFERENCE.fake_quantize_rows(x, counters=expected_counts, **options)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.global_scale, expected.global_scale)
    assert torch.equal(values.isnan(), expected_values.isnan())
    assert torch.equal(values.nan_to_num().view(torch.int16), expected_values.nan_to_num().view(torch.int16))
    assert torch.equal(counted, expected_counts)
    alone = CPU.quantize_rows(x, hints=True, **options)
    assert torch.equal(alone.codes, expected.codes)
    assert torch.equal(alone.hints.view(torch.int16), REFERENCE.hint_bits(expected.codes).view(torch.int16))
    assert got.hints is None


def test_every_bf16_pattern_is_quantized_alike():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_same_rows(patterns.reshape(-1, 64))
    for anchor in (0.0, 1.0, 300.0):
        rows = torch.full((65536, 16), anchor, dtype=torch.bfloat16)
        rows[:, 7] = patterns
        assert_same_rows(rows)
        assert_same_rows(rows, global_scale=1.0)


@pytest.mark.parametrize("rotation", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("scale", [2.0**-130, 1e-6, 1.0, 3e4, 1e37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_rows_are_quantized_alike(rotation, scale, dtype):
    x = (torch.randn(33, 256, generator=torch.Generator().manual_seed(7)) * scale).to(dtype)
    x[3] = 0
    x[4, 17] = float("nan")
    x[5, 100] = float("-inf")
    assert_same_rows(x, rotation=rotation)
    assert_same_rows(x, rotation=rotation, global_scale=0.25)
    assert_same_rows(x, rotation=rotation, global_scale=0.3)


def test_every_number_of_blocks_is_quantized_alike():
    generator = torch.Generator().manual_seed(9)
    for blocks in range(1, 40):
        x = torch.randn(3, 16 * blocks, generator=generator)
        assert_same_rows(x)
        assert_same_rows(x.to(torch.bfloat16), rotation=16)
        assert_same_rows(x.to(torch.bfloat16), global_scale=2.0**-12)
    assert_same_rows(torch.randn(2, 16384, dtype=torch.bfloat16, generator=generator), rotation=128)


def test_every_scale_byte_is_reached_and_read_alike():
    magnitudes = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = magnitudes.unsqueeze(1).repeat(1, 16) * torch.linspace(0, 1, 16).to(torch.bfloat16)
    assert_same_rows(x, global_scale=1.0)
    assert REFERENCE.quantize_rows(x, global_scale=1.0).scales.unique().numel() == 127


def test_float16_rows_are_quantized_alike():
    assert_same_rows(torch.randn(7, 64, generator=torch.Generator().manual_seed(2)).to(torch.float16))


def test_exact_ties_are_quantized_alike():
    ties = torch.tensor(
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0]
    )
    assert_same_rows(ties.unsqueeze(0), global_scale=1.0)


@BOTH
def test_a_strided_view_equals_its_copy(kernels):
    x = torch.randn(8, 192, dtype=torch.bfloat16)[::2, 64:128]
    assert torch.equal(kernels.quantize_rows(x).codes, kernels.quantize_rows(x.contiguous()).codes)


@BOTH
def test_no_rows_give_no_rows(kernels):
    values, q = kernels.fake_quantize_rows(torch.zeros(0, 576, dtype=torch.bfloat16), rotation=64)
    assert values.shape == (0, 576)
    assert q.codes.shape == (0, 288)
    assert q.scales.shape == (0, 36)


@BOTH
def test_counters_add_up_over_calls(kernels):
    counters = new_counters()
    x = torch.full((2, 16), float("inf"))
    for _ in range(3):
        kernels.quantize_rows(x, counters=counters)
    assert counters.tolist() == [96, 0, 0]


def make_pool():
    x = torch.randn(40 * 3, 64, dtype=torch.bfloat16)
    x[9, 3] = float("nan")
    q = REFERENCE.quantize_rows(x, global_scale=0.5)
    return q.codes.view(40, 3, 32), q.scales.view(40, 3, 4)


def test_gathering_equals_dequantizing_the_whole_pool():
    codes, scales = make_pool()
    everything = REFERENCE.gather_dequantize(codes, scales, torch.arange(40), 0.5)
    index = torch.tensor([3, 3, 39, 0, 17])
    for kernels in (REFERENCE, CPU):
        got = kernels.gather_dequantize(codes, scales, index, 0.5)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.nan_to_num(), everything[index].nan_to_num())
        assert torch.equal(got.isnan(), everything[index].isnan())
        assert kernels.gather_dequantize(codes, scales, index[:0], 0.5).shape == (0, 3, 64)


@BOTH
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 0.037, 2.0**100])
def test_every_code_under_every_scale_byte_reads_as_what_it_stands_for(kernels, scale):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 32, 8).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1, 1).repeat(1, 32, 1)
    got = kernels.gather_dequantize(codes, scales, torch.arange(256), scale)
    values, decoded = unpack_values(codes[0]).double(), e4m3.decode(scales[:, 0, 0]).double()
    expected = (values * decoded.view(256, 1, 1)).float() * torch.tensor(scale)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.to(torch.bfloat16).nan_to_num())


def test_a_pool_that_is_a_slice_of_a_larger_buffer_reads_alike():
    codes, scales = make_pool()
    wide = torch.zeros(40, 6, 32, dtype=torch.uint8)
    wide[:, ::2] = codes
    index = torch.arange(40, dtype=torch.int32)
    got = CPU.gather_dequantize(wide[:, ::2], scales, index, 0.5)
    assert torch.equal(got.nan_to_num(), CPU.gather_dequantize(codes, scales, index, 0.5).nan_to_num())


@BOTH
@pytest.mark.parametrize("slot", [40, 10_000])
def test_a_slot_outside_the_pool_is_an_index_error(kernels, slot):
    codes, scales = make_pool()
    with pytest.raises(IndexError):
        kernels.gather_dequantize(codes, scales, torch.tensor([1, slot]), 1.0)


def test_hint_bits_agree():
    codes = torch.randint(0, 256, (5, 3, 24), dtype=torch.uint8)
    assert torch.equal(CPU.hint_bits(codes).view(torch.int16), REFERENCE.hint_bits(codes).view(torch.int16))


@BOTH
def test_wrong_arguments_are_refused_by_name(kernels):
    for call, field in [
        (lambda: kernels.quantize_rows(torch.zeros(2, 24)), "x"),
        (lambda: kernels.quantize_rows(torch.zeros(16)), "x"),
        (lambda: kernels.quantize_rows(torch.zeros(2, 48), rotation=32), "rotation"),
        (lambda: kernels.quantize_rows(torch.zeros(2, 48), rotation=8), "rotation"),
        (lambda: kernels.quantize_rows(torch.zeros(2, 48, dtype=torch.int32)), "x"),
        (lambda: kernels.hint_bits(torch.zeros(2, 12, dtype=torch.uint8)), "codes"),
        (lambda: kernels.hint_bits(torch.zeros(2, 16, dtype=torch.int32)), "codes"),
        (lambda: kernels.quantize_rows(torch.zeros(2, 48), global_scale=0.0), "global_scale"),
    ]:
        with pytest.raises(ShapeError) as caught:
            call()
        assert caught.value.field == field
    codes, scales = make_pool()
    for arguments, field in [
        ((codes.to(torch.int32), scales, torch.arange(2)), "codes"),
        ((codes, scales[:, :, :2], torch.arange(2)), "scales"),
        ((codes, scales, torch.zeros(2)), "index"),
    ]:
        with pytest.raises(ShapeError) as caught:
            kernels.gather_dequantize(*arguments, 1.0)
        assert caught.value.field == field


def test_every_backend_says_why_it_cannot_run():
    states = {state.name: state for state in available("cuda")}
    assert not states["cpu"].usable
    assert "not on cuda" in states["cpu"].reason
    assert get_kernels("auto", "cpu").name == "cpu"
    with pytest.raises(ConfigError, match="cannot run on cuda"):
        get_kernels("cpu", "cuda")
    with pytest.raises(ConfigError, match="expected auto or one of cpu, triton, reference"):
        get_kernels("fast")


def test_asking_for_the_reference_does_not_load_the_compiler():
    code = (
        "import sys\nfrom trace_serve.kernels import get_kernels\nget_kernels('reference')\n"
        "assert 'trace_serve.kernels.cpu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
