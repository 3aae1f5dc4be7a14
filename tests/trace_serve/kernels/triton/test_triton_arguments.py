"""Wrong arguments are refused by name before anything is launched."""

import pytest
import torch

from trace_serve.errors import ShapeError
from trace_serve.kernels.triton import (
    KVBuffers,
    decode_attention,
    expert_product,
    gather_dequantize,
    group_by_expert,
    quantize_rows,
    quantize_silu_and_mul,
    silu_and_mul,
    store_kv,
)
from trace_serve.nvfp4 import Quantized


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def u8(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: quantize_rows(bf16(2, 24)), "x"),
        (lambda: quantize_rows(bf16(16)), "x"),
        (lambda: quantize_rows(torch.zeros(2, 16, dtype=torch.int32)), "x"),
        (lambda: quantize_rows(bf16(1, 32784)), "x"),
        (lambda: quantize_rows(bf16(2, 48), rotation=32), "rotation"),
        (lambda: quantize_rows(bf16(2, 512), rotation=256), "rotation"),
        (lambda: quantize_rows(bf16(2, 16), rotation=8), "rotation"),
        (lambda: quantize_rows(bf16(2, 48), global_scale=0.0), "global_scale"),
        (lambda: quantize_rows(bf16(2, 48), global_scale=torch.ones(3)), "global_scale"),
        (lambda: quantize_rows(bf16(2, 48), global_scale=torch.ones(2).double()), "global_scale"),
        (lambda: quantize_rows(bf16(2, 48), global_scale=torch.tensor([1.0, -1.0])), "global_scale"),
        (lambda: quantize_rows(bf16(2, 48), counters=torch.zeros(3, dtype=torch.int32)), "counters"),
        (lambda: quantize_silu_and_mul(bf16(2, 48)), "gate_up"),
        (lambda: quantize_silu_and_mul(torch.zeros(2, 64)), "gate_up"),
        (lambda: quantize_silu_and_mul(bf16(2, 64), rotation=64), "rotation"),
        (lambda: silu_and_mul(torch.zeros(2, 64)), "gate_up"),
    ],
)
def test_rows(call, field):
    with pytest.raises(ShapeError) as caught:
        call()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("shapes", "interleaved", "field"),
    [
        (((8, 2, 32), (8, 2, 32), (8, 2, 4), (8, 2, 3)), False, "v_scales"),
        (((8, 2, 30), (8, 2, 30), (8, 2, 4), (8, 2, 4)), False, "k_codes"),
        (((8, 2, 32), (8, 1, 32), (8, 2, 4), (8, 1, 4)), False, "v_codes"),
        (((8, 2, 32), (8, 2, 32), (8, 2, 4), (8, 2, 4)), True, "v_interleaved"),
        (((8, 2, 6, 32), (8, 2, 6, 32), (8, 2, 6, 4), (8, 2, 6, 4)), True, "v_interleaved"),
        (((8, 2, 8, 16), (8, 2, 8, 16), (8, 2, 8, 2), (8, 2, 8, 2)), True, "v_interleaved"),
    ],
)
def test_kv_buffers(shapes, interleaved, field):
    with pytest.raises(ShapeError) as caught:
        KVBuffers(*(u8(*shape) for shape in shapes), interleaved)
    assert caught.value.field == field


BUFFERS = KVBuffers(u8(8, 2, 32), u8(8, 2, 32), u8(8, 2, 4), u8(8, 2, 4))
GOOD = {"k": bf16(3, 2, 64), "v": bf16(3, 2, 64), "index": torch.arange(3)}
SCALES = {"k_global_scale": 1.0, "v_global_scale": 1.0}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"k": bf16(3, 2, 32)}, "k"),
        ({"v": bf16(2, 2, 64)}, "v"),
        ({"v": torch.zeros(3, 2, 64)}, "v"),
        ({"index": torch.arange(4)}, "index"),
        ({"index": torch.zeros(3)}, "index"),
        ({"k_rotation": 128}, "k_rotation"),
        ({"v_global_scale": float("inf")}, "v_global_scale"),
        ({"counters": torch.zeros(2, dtype=torch.int64)}, "counters"),
    ],
)
def test_kv_store(change, field):
    with pytest.raises(ShapeError) as caught:
        store_kv(buffers=BUFFERS, **{**GOOD, **SCALES, **change})
    assert caught.value.field == field


def test_a_buffer_with_gaps_is_refused():
    with pytest.raises(ShapeError) as caught:
        KVBuffers(u8(8, 4, 32)[:, ::2], u8(8, 2, 32), u8(8, 2, 4), u8(8, 2, 4))
    assert caught.value.field == "k_codes"


@pytest.mark.parametrize("slot", [8, -1])
def test_a_slot_outside_the_pool_is_an_index_error(slot):
    with pytest.raises(IndexError, match="outside the pool of 8"):
        gather_dequantize(BUFFERS.k_codes, BUFFERS.k_scales, torch.tensor([1, slot]), 1.0)


WEIGHT = Quantized(u8(2, 32, 32), u8(2, 32, 4), torch.ones(2))
ROWS = Quantized(u8(4, 32), u8(4, 4), torch.ones(4))
TILES = group_by_expert(torch.zeros(4, 1, dtype=torch.int64), 2)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: group_by_expert(torch.zeros(4), 2), "topk_ids"),
        (lambda: expert_product(bf16(4, 32), WEIGHT, TILES, pairs=4), "x"),
        (lambda: expert_product(torch.zeros(4, 64), WEIGHT, TILES, pairs=4), "x"),
        (lambda: expert_product(Quantized(ROWS.codes, ROWS.scales, torch.ones(3)), WEIGHT, TILES, pairs=4), "x"),
        (lambda: expert_product(ROWS, WEIGHT, TILES, pairs=6), "pairs"),
        (lambda: expert_product(ROWS, WEIGHT, TILES, pairs=4, out_dtype=torch.float16), "out_dtype"),
        (
            lambda: expert_product(ROWS, Quantized(WEIGHT.codes, WEIGHT.scales[:1], torch.ones(2)), TILES, pairs=4),
            "weight",
        ),
        (lambda: expert_product(ROWS, Quantized(WEIGHT.codes, WEIGHT.scales, torch.ones(1)), TILES, pairs=4), "weight"),
        (
            lambda: expert_product(ROWS, Quantized(u8(2, 32, 30), WEIGHT.scales, torch.ones(2)), TILES, pairs=4),
            "weight",
        ),
    ],
)
def test_experts(call, field):
    with pytest.raises(ShapeError) as caught:
        call()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"q": bf16(2, 3, 64)}, "q"),
        ({"q": torch.zeros(2, 4, 64)}, "q"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, "starts"),
        ({"index": torch.zeros(4)}, "index"),
        ({"splits": 0}, "splits"),
    ],
)
def test_attention(change, field):
    good = {
        "q": bf16(2, 4, 64),
        "starts": torch.zeros(3, dtype=torch.int32),
        "index": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ShapeError) as caught:
        decode_attention(
            buffers=BUFFERS,
            **{**good, "splits": 1, **change},
            softmax_scale=0.1,
            k_global_scale=1.0,
            v_global_scale=1.0,
        )
    assert caught.value.field == field
