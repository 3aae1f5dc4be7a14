"""What the kernels compile to for cards that are not here: the conversion instructions, 16-byte accesses, no spills, no
shared memory or barriers where a row fits in a warp."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offline_compile import Machine, compiling_for, machine_of

from trace_serve import nvfp4
from trace_serve.kernels.triton import (
    KVBuffers,
    decode_attention,
    expert_product,
    gather_dequantize,
    group_by_expert,
    quantize_rows,
    quantize_silu_and_mul,
    store_kv,
)
from trace_serve.kernels.triton.follow import follow_rows
from trace_serve.recipe import PRESETS

LOAD_16 = r"ld\.global[^;]*\.v4\.b32"
STORE_16 = r"st\.global[^;]*\.v4\.b32"
COUNTERS = nvfp4.new_counters()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], object], int], Machine]:
    directory: Path = tmp_path_factory.mktemp("triton")
    return lambda call, capability: machine_of(call, capability, directory)


def rows(k: int, dtype: torch.dtype = torch.bfloat16, n: int = 4) -> torch.Tensor:
    return torch.zeros(n, k, dtype=dtype)


def kv(page: int = 0, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KVBuffers]:
    heads, d, slots = 2, 128, 64
    outer = (slots // page, heads, page) if page else (slots, heads)
    codes = [torch.zeros(*outer, d // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(*outer, d // 16, dtype=torch.uint8) for _ in range(2)]
    fused = torch.zeros(slots, 3 * heads * d, dtype=torch.bfloat16)
    k, v = (fused[:, i * heads * d : (i + 1) * heads * d].view(slots, heads, d) for i in (1, 2))
    return k, v, torch.arange(slots), KVBuffers(*codes, *scales, interleaved)


def assert_exact(machine: Machine, capability: int) -> None:
    """No flushed subnormals, no contraction that would skip a rounding, and the conversion that the card has."""
    assert machine.stack == 0
    assert machine.count(r"\.ftz") == 0
    # What is fused on purpose doubles or halves, which is exact, before it adds the rounding constant.
    fused = machine.count(r"fma\.rn\.f32")
    assert fused == machine.count(r"fma\.rn\.f32[^;]*, 0f(40000000|3F000000), 0f4B40000[04];")
    assert (fused > 0) == (capability < 100)
    assert (machine.count(r"cvt\.rn\.satfinite\.e2m1x2\.f32") > 0) == (capability >= 100)
    assert machine.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0


def assert_streaming(machine: Machine, capability: int) -> None:
    """Exact, and nothing but registers between 16-byte loads and the stores."""
    assert_exact(machine, capability)
    assert machine.shared == 0
    assert machine.barriers == 0
    assert machine.count(LOAD_16) >= 2
    assert machine.count_sass(r"LDG\.E[.\w]*\.128") >= 2
    assert machine.count(r"ld\.global[^;]*\.b16") == 0


@pytest.mark.parametrize(
    ("k", "capability"), [(128, 90), (576, 90), (576, 100), (2048, 90), (2048, 100), (2048, 103), (4096, 100)]
)
def test_rows_with_a_scale_a_token_need_no_barrier(build, k, capability):
    machine = build(lambda: quantize_rows(rows(k), counters=COUNTERS, hints=True), capability)
    assert_streaming(machine, capability)
    assert machine.registers <= (128 if k <= 2048 else 200)


@pytest.mark.parametrize("capability", [90, 100, 103])
@pytest.mark.parametrize("preset", ["gb200", "paper"])
def test_the_fp32_scales_of_other_recipes_stream_too(build, preset, capability):
    rules = nvfp4.rules(PRESETS[preset], "activations")
    machine = build(lambda: quantize_rows(rows(2048), rules=rules, counters=COUNTERS, hints=True), capability)
    assert_streaming(machine, capability)
    assert machine.count(r"rcp\.approx|div\.full|div\.approx") == 0
    assert machine.registers <= 160


@pytest.mark.parametrize("capability", [90, 100])
def test_dividing_and_rounding_ties_up_need_no_memory_either(build, capability):
    rules = nvfp4.Rules("amax_over_six_g", "divide", "up", "one", False, False)
    machine = build(lambda: quantize_rows(rows(576), rules=rules, counters=COUNTERS, hints=True), capability)
    assert_streaming(machine, capability)
    assert machine.count(r"div\.rn\.f32") > 0


@pytest.mark.parametrize("capability", [90, 100])
def test_hints_add_one_store_a_block_and_no_load(build, capability):
    plain = build(lambda: quantize_rows(rows(2048)), capability)
    hinted = build(lambda: quantize_rows(rows(2048), hints=True), capability)
    assert hinted.count(r"ld\.global") == plain.count(r"ld\.global")
    assert hinted.count(r"st\.global") == plain.count(r"st\.global") + 4
    assert_streaming(plain, capability)
    assert plain.registers <= 72


@pytest.mark.parametrize("capability", [90, 100])
def test_a_static_scale_runs_over_contiguous_memory_whatever_the_row(build, capability):
    machines = {build(lambda k=k: quantize_rows(rows(k), global_scale=1.0), capability).ptx for k in (16, 64, 2880)}
    assert len(machines) == 1
    assert_streaming(build(lambda: quantize_rows(rows(2880), global_scale=1.0), capability), capability)


@pytest.mark.parametrize("capability", [90, 100])
def test_kept_values_are_stored_16_bytes_at_a_time(build, capability):
    machine = build(lambda: quantize_rows(rows(2048), counters=COUNTERS, values=True), capability)
    assert_streaming(machine, capability)
    assert machine.count(STORE_16) == 8


@pytest.mark.parametrize(("rotation", "capability"), [(16, 90), (64, 90), (128, 100)])
def test_a_rotation_exchanges_between_lanes_without_memory(build, rotation, capability):
    machine = build(lambda: quantize_rows(rows(1024), rotation=rotation), capability)
    assert_streaming(machine, capability)
    assert (machine.count(r"shfl\.sync") > 0) == (rotation > 16)


@pytest.mark.parametrize("capability", [90, 100])
def test_fp32_rows_and_given_scales_stream_too(build, capability):
    given = torch.ones(4)
    assert_streaming(build(lambda: quantize_rows(rows(256, torch.float32), global_scale=given), capability), capability)


@pytest.mark.parametrize("capability", [90, 100])
def test_a_row_longer_than_a_warp_holds_shares_memory_only_for_its_maximum(build, capability):
    machine = build(lambda: quantize_rows(rows(7168), hints=True), capability)
    assert_exact(machine, capability)
    assert 0 < machine.shared <= 64


@pytest.mark.parametrize(("k", "capability"), [(768, 90), (768, 100), (704, 103)])
def test_silu_and_mul_is_fused(build, k, capability):
    machine = build(lambda: quantize_silu_and_mul(rows(2 * k), counters=COUNTERS, hints=True), capability)
    assert_streaming(machine, capability)
    assert machine.count(r"div\.rn\.f32") > 0
    assert machine.count(r"ex2\.approx|rcp\.approx|div\.full") == 0


@pytest.mark.parametrize(
    ("page", "interleaved", "rotation", "capability"),
    [(0, False, 0, 90), (0, False, 64, 100), (16, False, 0, 90), (16, True, 64, 100), (16, True, 0, 103)],
)
def test_the_kv_store_streams_into_both_layouts(build, page, interleaved, rotation, capability):
    k, v, index, buffers = kv(page, interleaved)
    scales = {"k_global_scale": 1.0, "v_global_scale": 1.0}
    for preset in ("portable", "gb200"):
        options = {"rules": nvfp4.rules(PRESETS[preset], "kv"), "k_rotation": rotation, "counters": COUNTERS}
        machine = build(lambda o=options: store_kv(k, v, index, buffers, **scales, **o, hints=True), capability)
        assert_streaming(machine, capability)
        assert machine.registers <= 64


@pytest.mark.parametrize(
    ("page", "interleaved", "capability"), [(0, False, 90), (0, False, 100), (16, True, 90), (16, True, 103)]
)
def test_the_kv_gather_stores_16_bytes_a_lane_and_needs_few_registers(build, page, interleaved, capability):
    _, _, index, buffers = kv(page, interleaved)
    machine = build(
        lambda: gather_dequantize(buffers.v_codes, buffers.v_scales, index, 1.0, interleaved=interleaved), capability
    )
    assert machine.stack == machine.shared == machine.barriers == 0
    assert machine.count(STORE_16) == 1
    assert machine.count(r"\.ftz") == 0
    assert machine.registers <= 32


def experts(k: int = 2048, n: int = 256, count: int = 4) -> tuple[nvfp4.Quantized, nvfp4.Quantized]:
    """Rows and weights of zeros."""
    row_codes, row_scales = (torch.zeros(8, last, dtype=torch.uint8) for last in (k // 2, k // 16))
    codes, scales = (torch.zeros(count, n, last, dtype=torch.uint8) for last in (k // 2, k // 16))
    return nvfp4.Quantized(row_codes, row_scales, torch.ones(8)), nvfp4.Quantized(codes, scales, torch.ones(count))


@pytest.mark.parametrize(("rows", "capability"), [(16, 100), (32, 100), (64, 100), (128, 100), (16, 103)])
def test_fp4_experts_are_block_scaled_on_blackwell(build, rows, capability):
    x, weight = experts()
    tiles = group_by_expert(torch.zeros(8, 1, dtype=torch.int64), 4, rows)
    machine = build(lambda: expert_product(x, weight, tiles, pairs=8), capability)
    assert machine.count(r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.block16") > 0
    # The fallback expands both operands to BF16.
    assert machine.count(r"kind::f16") == 0
    assert machine.count(r"mul(\.rn)?(\.bf16x2|\.f32)") < 32 * rows
    assert machine.stack == 0


@pytest.mark.parametrize(("rows", "fp4"), [(16, False), (128, False), (16, True), (64, True)])
def test_experts_on_hopper_use_its_tensor_cores_without_spilling(build, rows, fp4):
    x, weight = experts(2880)
    tiles = group_by_expert(torch.zeros(8, 1, dtype=torch.int64), 4, rows)
    operand = x if fp4 else torch.zeros(8, 2880, dtype=torch.bfloat16)
    machine = build(lambda: expert_product(operand, weight, tiles, pairs=8), 90)
    assert machine.count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{rows}k16\.f32\.bf16\.bf16") > 0
    # Weights are fetched ahead of the product.
    assert machine.count(r"cp\.async\.c[ag]\.shared\.global[^;]*0x(8|10)") > 0
    assert machine.stack == 0
    assert machine.count(r"e2m1x2") == 0


@pytest.mark.parametrize(("k", "kind", "capability"), [(2048, "lsb", 90), (2048, "byte", 100), (7168, "lsb", 103)])
def test_rows_that_follow_a_rollout_stream_without_spilling(build, k, kind, capability):
    bits, scales = torch.zeros(4, k // 16, dtype=torch.int32), torch.zeros(4, k // 16, dtype=torch.uint8)
    present, scale = torch.ones(4, dtype=torch.bool), torch.ones(4)
    options = {"scale_kind": kind, "rules": nvfp4.PORTABLE_RULES, "tau": 0.5, "values": True}
    machine = build(
        lambda: follow_rows(rows(k), bits, scales, rollout_scale=scale, present=present, **options), capability
    )
    assert machine.stack == 0
    assert machine.count(r"\.ftz") == 0
    assert machine.count(LOAD_16) >= 4
    assert machine.count(STORE_16) >= 2
    assert machine.registers <= 80
    if k == 2048:
        assert machine.shared == machine.barriers == 0


@pytest.mark.parametrize(
    ("page", "interleaved", "capability"), [(0, False, 90), (16, True, 90), (0, False, 100), (16, True, 103)]
)
def test_decode_attention_uses_tensor_cores_without_spilling(tmp_path, page, interleaved, capability):
    _, _, index, buffers = kv(page, interleaved)
    with compiling_for(capability, tmp_path) as compiled:
        decode_attention(
            torch.zeros(2, 16, 128, dtype=torch.bfloat16),
            buffers,
            torch.zeros(3, dtype=torch.int32),
            index,
            softmax_scale=0.1,
            k_global_scale=1.0,
            v_global_scale=1.0,
            splits=4,
        )
    split, combine = compiled
    assert split.count(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32") > 0
    assert split.stack == combine.stack == combine.shared == 0
    assert split.registers <= 200


def test_batch_sizes_do_not_start_another_compilation(tmp_path):
    with compiling_for(90, tmp_path) as compiled:
        for n in (1, 3, 16, 1000):
            quantize_rows(rows(64, n=n), counters=COUNTERS)
    assert len({machine.ptx for machine in compiled}) == 1
