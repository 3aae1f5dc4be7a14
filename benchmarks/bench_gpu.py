"""Bandwidth of the Triton kernels on a card, beside the bandwidth of a copy: `make bench-gpu`.

Bytes are those that a kernel must read and write once. Every figure is the median of repeated runs with the L2 cache
flushed between them; the last column compares with a device copy of as many bytes. Exit code 2 without a card.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.testing
from rich.console import Console
from rich.table import Table

from trace_serve import nvfp4
from trace_serve.guided.outcomes import Outcomes
from trace_serve.guided.quantize import guided_fake_quantize
from trace_serve.kernels.triton import (
    KVBuffers,
    choose_splits,
    decode_attention,
    expert_product,
    gather_dequantize,
    group_by_expert,
    quantize_rows,
    quantize_silu_and_mul,
    store_kv,
)
from trace_serve.recipe import BLOCK, Recipe

RECIPE = Recipe()
CODE = 0.5 + 1 / BLOCK
"""Bytes a value of codes and scale."""
HINT = 2 / BLOCK
"""Bytes a value of hints."""


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    moved: float
    run: Callable[[], object]


def milliseconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median"))


def copy_milliseconds(moved: float) -> float:
    """Time of a device copy that reads and writes `moved` bytes together."""
    source = torch.empty(max(int(moved) // 2, 16), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def row_cases(rows: int, k: int) -> list[Case]:
    x = torch.randn(rows, k, device="cuda").bfloat16()
    counters = nvfp4.new_counters("cuda")
    shape, n = f"{rows} x {k}", rows * k
    cases = [
        Case("quantize, scale a token", shape, n * (2 + CODE), lambda: quantize_rows(x, counters=counters)),
        Case(
            "quantize, scale a token, hints",
            shape,
            n * (2 + CODE + HINT),
            lambda: quantize_rows(x, counters=counters, hints=True),
        ),
        Case(
            "quantize, static, hints",
            shape,
            n * (2 + CODE + HINT),
            lambda: quantize_rows(x, global_scale=1.0, counters=counters, hints=True),
        ),
        Case(
            "quantize, kept values, hints",
            shape,
            n * (4 + CODE + HINT),
            lambda: quantize_rows(x, counters=counters, hints=True, values=True),
        ),
    ]
    if k % 64 == 0:
        cases.append(
            Case(
                "rotate 64 and quantize, hints",
                shape,
                n * (2 + CODE + HINT),
                lambda: quantize_rows(x, rotation=64, counters=counters, hints=True),
            )
        )
    gate_up = torch.randn(rows, 2 * k, device="cuda").bfloat16()
    cases.append(
        Case(
            "silu-and-mul and quantize, hints",
            shape,
            n * (4 + CODE + HINT),
            lambda: quantize_silu_and_mul(gate_up, counters=counters, hints=True),
        )
    )
    return cases


def follow_case(rows: int, k: int) -> Case:
    """Guided rounding of a trainer's rows, straight-through values alone."""
    x = torch.randn(rows, k, device="cuda").bfloat16()
    own = quantize_rows(x, hints=True).quantized
    assert own.hints is not None
    outcomes = Outcomes(own.hints, own.scales & 1, "lsb", own.global_scale)
    # The kernel writes codes and scales beside the values.
    moved = rows * k * (4 + CODE + HINT + 1 / BLOCK)
    return Case("guided rounding, lsb", f"{rows} x {k}", moved, lambda: guided_fake_quantize(x, outcomes, RECIPE))


def zero_buffers(outer: tuple[int, ...], d: int, *, interleaved: bool = False) -> KVBuffers:
    def zeros(last: int) -> torch.Tensor:
        return torch.zeros(*outer, last, dtype=torch.uint8, device="cuda")

    return KVBuffers(zeros(d // 2), zeros(d // 2), zeros(d // BLOCK), zeros(d // BLOCK), interleaved)


def kv_cases(tokens: int, heads: int, d: int, page: int) -> list[Case]:
    outer = (tokens // page, heads, page) if page else (tokens, heads)
    buffers = zero_buffers(outer, d, interleaved=page > 0)
    k, v = (torch.randn(tokens, heads, d, device="cuda").bfloat16() for _ in range(2))
    index = torch.randperm(tokens, device="cuda")
    counters = nvfp4.new_counters("cuda")
    shape, n = f"{tokens} x {heads} x {d}", tokens * heads * d
    layout = "paged, interleaved" if page else "slots"
    return [
        Case(
            f"store K and V, hints, {layout}",
            shape,
            2 * n * (2 + CODE + HINT),
            lambda: store_kv(
                k, v, index, buffers, k_global_scale=1.0, v_global_scale=1.0, counters=counters, hints=True
            ),
        ),
        Case(
            f"gather V to BF16, {layout}",
            shape,
            n * (2 + CODE),
            lambda: gather_dequantize(buffers.v_codes, buffers.v_scales, index, 1.0, interleaved=page > 0),
        ),
    ]


def product_cases(tokens: int, experts: int, top_k: int, n: int, k: int) -> list[Case]:
    codes, scales = (torch.zeros(experts, n, last, dtype=torch.uint8, device="cuda") for last in (k // 2, k // BLOCK))
    weight = nvfp4.Quantized(codes, scales, torch.ones(experts, device="cuda"))
    out = quantize_rows(torch.randn(tokens, k, device="cuda").bfloat16(), values=True)
    assert out.values is not None
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    tiles = group_by_expert(ids, experts)
    pairs, used = tokens * top_k, len(set(ids.flatten().tolist()))
    moved = used * n * k * CODE + pairs * n * 2
    shape = f"{tokens} tokens, {top_k} of {experts} x {n} x {k}"
    values, quantized = out.values, out.quantized
    return [
        Case(
            "experts, BF16 rows",
            shape,
            moved + tokens * k * 2,
            lambda: expert_product(values, weight, tiles, pairs=pairs),
        ),
        Case(
            "experts, FP4 rows",
            shape,
            moved + tokens * k * CODE,
            lambda: expert_product(quantized, weight, tiles, pairs=pairs),
        ),
    ]


def attention_case(requests: int, length: int, heads: int, group: int, d: int) -> Case:
    slots = requests * length
    buffers = zero_buffers((slots, heads), d)
    q = torch.randn(requests, heads * group, d, device="cuda").bfloat16()
    starts = torch.arange(requests + 1, device="cuda") * length
    index = torch.randperm(slots, device="cuda")
    splits = choose_splits(requests, heads, length)
    return Case(
        "decode attention",
        f"{requests} x {length} tokens, {heads} x {group} heads x {d}",
        2 * slots * heads * d * CODE,
        lambda: decode_attention(
            q,
            buffers,
            starts,
            index,
            softmax_scale=1 / math.sqrt(d),
            k_global_scale=1.0,
            v_global_scale=1.0,
            splits=splits,
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384, help="rows of the large cases")
    arguments = parser.parse_args()
    console = Console()
    if not torch.cuda.is_available():
        console.print("bench-gpu needs an NVIDIA GPU and found none; nothing was measured")
        return 2
    table = Table(title=f"{torch.cuda.get_device_name()}, Triton {triton.__version__}")
    for heading in ("kernel", "shape", "us", "GB/s", "of copy"):
        table.add_column(heading, justify="left" if heading in ("kernel", "shape") else "right")
    builders: list[Callable[[], list[Case]]] = [
        *(lambda k=k: row_cases(arguments.rows, k) for k in (2048, 2880, 7168)),
        lambda: row_cases(64, 2048),
        lambda: [follow_case(arguments.rows, k) for k in (2048, 7168)],
        *(lambda page=page: kv_cases(arguments.rows * 4, 2, 256, page) for page in (0, 64)),
        *(lambda tokens=tokens: product_cases(tokens, 256, 8, 1024, 2048) for tokens in (16, 256, 4096)),
        lambda: [attention_case(64, 8192, 2, 8, 256), attention_case(8, 32768, 2, 8, 256)],
    ]
    for build in builders:
        for case in build():
            took, copied = milliseconds(case.run), copy_milliseconds(case.moved)
            rate = case.moved / took / 1e6
            table.add_row(case.name, case.shape, f"{took * 1e3:.1f}", f"{rate:.0f}", f"{copied / took:.0%}")
        torch.cuda.empty_cache()
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
