import importlib.util

import pytest
import torch

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import (
    deinterleave_v,
    dequantize,
    e4m3,
    interleave_v,
    quantize,
    swizzle,
    swizzled_size,
    unswizzle,
)
from trace_serve.nvfp4.quantize import Quantized
from trace_serve.recipe import Recipe

POISON = 0x7F
TILED = pytest.mark.parametrize("layout", ["128x4", "8x4"])


def some_scales(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 127, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 33, 127, 128, 129, 300])
def test_reading_back_gives_what_was_written_for_every_number_of_columns(layout, rows):
    for columns in [*range(1, 14), 36, 45]:
        scales = some_scales(rows, columns)
        data = swizzle(scales, layout, fill=POISON)
        assert data.shape == (swizzled_size(rows, columns, layout),)
        assert torch.equal(unswizzle(data, rows, columns, layout), scales)


@TILED
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (129, 5), (40, 36), (8, 4)])
def test_every_byte_is_where_the_kernels_look_for_it(layout, rows, columns):
    tile = {"128x4": 128, "8x4": 8}[layout]
    scales = some_scales(rows, columns)
    data = swizzle(scales, layout)
    row_bytes = tile * (-(-columns // 4) * 4)
    for r in range(rows):
        for c in range(columns):
            inside = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4 if tile == 128 else (r % 8) * 4 + c % 4
            assert data[r // tile * row_bytes + c // 4 * tile * 4 + inside] == scales[r, c]


@TILED
def test_padding_never_leaks(layout):
    scales = some_scales(45, 6)
    clean, poisoned = swizzle(scales, layout), swizzle(scales, layout, fill=POISON)
    assert (poisoned == POISON).sum() == clean.numel() - scales.numel()
    codes = torch.randint(0, 256, (45, 48), dtype=torch.uint8)
    values = [
        dequantize(Quantized(codes, unswizzle(data, 45, 6, layout), torch.ones(45))) for data in (clean, poisoned)
    ]
    assert torch.equal(values[0], values[1])
    assert values[1].isfinite().all()


@TILED
def test_padding_of_a_matrix_of_no_rows_is_nothing(layout):
    assert swizzle(torch.zeros(0, 7, dtype=torch.uint8), layout).numel() == 0


@TILED
def test_an_expert_of_a_stack_is_laid_out_as_if_alone_when_its_size_is_padded(layout):
    stack = torch.stack([some_scales(2880 // 16, 2880 // 16 + e)[:, :180] for e in range(3)])
    together = swizzle(stack, layout, fill=POISON)
    for expert in range(3):
        assert torch.equal(together[expert], swizzle(stack[expert], layout, fill=POISON))
    assert torch.equal(unswizzle(together, 180, 180, layout), stack)


@pytest.fixture(scope="module")
def serving_engine():
    """SGLang's own coordinates, from the one file: importing the package around it takes half a minute."""
    package = importlib.util.find_spec("sglang")
    folder = package.submodule_search_locations[0]
    path = f"{folder}/srt/layers/quantization/nvfp4_kv_cache.py"
    spec = importlib.util.spec_from_file_location("sglang_nvfp4_kv_cache", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_v_scales_are_interleaved_as_the_serving_engine_does(serving_engine, head_dim):
    tokens, columns = 12, head_dim // 16
    scales = some_scales(2 * tokens, columns).reshape(2, tokens, columns)
    token, column = torch.meshgrid(torch.arange(tokens), torch.arange(columns), indexing="ij")
    to_token, to_column = serving_engine.nvfp4_v_scale_swizzle_indices(token, column, columns)
    expected = torch.zeros_like(scales)
    expected[:, to_token, to_column] = scales
    assert torch.equal(interleave_v(scales), expected)
    assert torch.equal(deinterleave_v(expected), scales)


def test_reading_v_in_either_layout_gives_the_error_of_v_itself():
    generator = torch.Generator().manual_seed(8)
    v = torch.randn(16, 64, generator=generator) * 10 ** torch.empty(16, 1).uniform_(-1, 1, generator=generator)
    q = quantize(v, 2.0**-3, Recipe(), operand="kv")
    direct = (dequantize(q, torch.float32) - v).norm()
    through_pool = Quantized(q.codes, deinterleave_v(interleave_v(q.scales)), q.global_scale)
    assert (dequantize(through_pool, torch.float32) - v).norm() == direct
    mistaken = Quantized(q.codes, interleave_v(q.scales), q.global_scale)
    assert (dequantize(mistaken, torch.float32) - v).norm() > 5 * direct


def test_wrong_arguments_are_refused_by_name():
    scales = some_scales(8, 4)
    for call, field in [
        (lambda: swizzle(scales.float(), "128x4"), "scales"),
        (lambda: swizzle(scales[0], "8x4"), "scales"),
        (lambda: swizzle(scales, "4x4"), "layout"),
        (lambda: unswizzle(scales.flatten(), 8, 4, "128x4"), "data"),
        (lambda: unswizzle(scales.flatten().float(), 8, 4, "8x4"), "data"),
        (lambda: interleave_v(some_scales(6, 4)), "scales"),
        (lambda: interleave_v(some_scales(8, 5)), "scales"),
    ]:
        with pytest.raises(ShapeError) as caught:
            call()
        assert caught.value.field == field


def test_the_poison_byte_is_the_one_that_reads_as_nan():
    assert e4m3.decode(torch.tensor([POISON], dtype=torch.uint8)).isnan()
