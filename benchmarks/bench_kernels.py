"""Table of the NVFP4 kernels on this CPU beside a memory copy and public CPU implementations, same data, same run.

    python benchmarks/bench_kernels.py [--rows 2048] [--columns 2048] [--repeats 21]

`copy` in a row is the time of copying memory with the same traffic (bytes read plus bytes written) in one thread;
`ratio` is the kernel's time over it. The cases run in a new order every repeat, so that the machine's load and what the
case before left in the caches fall on each of them; the spread is the middle half. torch runs in one thread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from trace_serve.kernels import cpu_loops, get_kernels
from trace_serve.recipe import BLOCK

BACKENDS = tuple(get_kernels(name) for name in ("cpu", "reference"))


@dataclass
class Case:
    """One line of the table: `run` reads and writes `traffic` bytes."""

    group: str
    name: str
    traffic: int
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(self.seconds)


def quantize_cases(x: torch.Tensor) -> list[Case]:
    rows, k = x.shape
    written = rows * (k // 2 + k // BLOCK + 4)
    hints, values = rows * k // 8, rows * k * 2
    cases = []
    for kernels in BACKENDS:
        name = kernels.name
        traffic = x.nbytes + written
        for suffix, extra, options in [
            ("", 0, {}),
            (" + hints", hints, {"hints": True}),
            (", rotated by 16", 0, {"rotation": 16}),
            (", rotated by 64", 0, {"rotation": 64}),
            (", rotated by 128", 0, {"rotation": 128}),
        ]:
            cases.append(
                Case("quantize", f"{name}{suffix}", traffic + extra, partial(kernels.quantize_rows, x, **options))
            )
        cases.append(Case("quantize", f"{name} + values", traffic + values, partial(kernels.fake_quantize_rows, x)))
    return cases


def given_memory_cases(x: torch.Tensor) -> list[Case]:
    """The CPU loops into memory that is mapped already: without the page faults of new large results."""
    rows, k = x.shape
    bits = x.view(torch.uint16).numpy()
    codes, scales = np.zeros((rows, k // 2), np.uint8), np.zeros((rows, k // BLOCK), np.uint8)
    g, hints = np.zeros(rows, np.float32), np.zeros((rows, k // BLOCK), np.uint16)
    values, counters = np.zeros((rows, k), np.uint16), np.zeros(3, np.int64)
    index = np.random.default_rng(1).permutation(rows)
    one, zero = np.float32(1), np.float32(0)
    quantize = partial(cpu_loops.quantize_rows, bits, 0, one, zero, codes, scales, g)
    traffic = x.nbytes + codes.nbytes + scales.nbytes + g.nbytes
    return [
        Case("into given memory", "cpu", traffic, partial(quantize, hints[:0], values[:0], counters)),
        Case(
            "into given memory", "cpu + hints", traffic + hints.nbytes, partial(quantize, hints, values[:0], counters)
        ),
        Case(
            "into given memory",
            "cpu, gather and dequantize",
            codes.nbytes + scales.nbytes + values.nbytes,
            partial(cpu_loops.gather_dequantize, codes, scales, index, one, values),
        ),
    ]


def hint_cases(x: torch.Tensor) -> list[Case]:
    codes = get_kernels("cpu").quantize_rows(x).codes
    traffic = codes.nbytes + codes.nbytes // 4
    return [
        Case("hint bits of packed codes", kernels.name, traffic, partial(kernels.hint_bits, codes))
        for kernels in BACKENDS
    ]


def gather_cases(x: torch.Tensor) -> list[Case]:
    q = get_kernels("cpu").quantize_rows(x, global_scale=1.0)
    heads, dim = x.shape[1] // 64, 64
    codes, scales = q.codes.view(-1, heads, dim // 2), q.scales.view(-1, heads, dim // BLOCK)
    index = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    traffic = codes.nbytes + scales.nbytes + x.numel() * 2
    return [
        Case(
            "gather and dequantize",
            kernels.name,
            traffic,
            partial(kernels.gather_dequantize, codes, scales, index, 1.0),
        )
        for kernels in BACKENDS
    ]


def modelopt_case(x: torch.Tensor, traffic: int) -> Case:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    version = importlib.metadata.version("nvidia-modelopt")
    return Case("quantize", f"modelopt {version}", traffic, partial(NVFP4QTensor.quantize, x, BLOCK))


def compressed_tensors_case(x: torch.Tensor, traffic: int) -> Case:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        symmetric=True,
        dynamic=False,
        group_size=BLOCK,
        scale_dtype=torch.float8_e4m3fn,
    )

    def run() -> torch.Tensor:
        g = generate_gparam(x.amin(), x.amax())
        blocks = x.reshape(x.shape[0], -1, BLOCK)
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=g)
        return pack_fp4_to_uint8(quantize(x, scales, None, arguments, global_scale=g))

    return Case("quantize", f"compressed-tensors {importlib.metadata.version('compressed-tensors')}", traffic, run)


def torchao_case(x: torch.Tensor, traffic: int) -> Case:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def run() -> object:
        return nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))

    return Case("quantize", f"torchao {importlib.metadata.version('torchao')}", traffic, run)


def public_cases(x: torch.Tensor) -> tuple[list[Case], list[str]]:
    traffic = x.nbytes + x.numel() // 2 + x.numel() // BLOCK
    cases, absent = [], []
    for build in (modelopt_case, compressed_tensors_case, torchao_case):
        try:
            case = build(x, traffic)
            case.run()
            cases.append(case)
        except ImportError as exc:
            absent.append(f"{build.__name__.removesuffix('_case')}: {exc}")
    return cases, absent


def copy_case(traffic: int) -> Case:
    source = np.ones(traffic // 2, dtype=np.uint8)
    target = np.empty_like(source)
    return Case("copy", str(traffic), traffic, partial(np.copyto, target, source))


def measure(cases: list[Case], repeats: int) -> None:
    for case in cases:
        case.run()
    order = random.Random(0)
    for _ in range(repeats):
        for case in order.sample(cases, len(cases)):
            start = time.perf_counter()
            case.run()
            case.seconds.append(time.perf_counter() - start)


def print_table(cases: list[Case], copies: dict[int, Case]) -> None:
    print(f"{'':52}{'median ms':>11}{'middle half':>17}{'GB/s':>8}{'copy ms':>9}{'ratio':>7}")
    group = ""
    for case in cases:
        if case.group != group:
            group = case.group
            print(group)
        low, _, high = statistics.quantiles(case.seconds, n=4)
        copy = copies[case.traffic].median()
        print(
            f"  {case.name:50}{case.median() * 1e3:11.3f}{f'{low * 1e3:.3f}-{high * 1e3:.3f}':>17}"
            f"{case.traffic / case.median() / 1e9:8.2f}{copy * 1e3:9.3f}{case.median() / copy:7.1f}"
        )


def print_summary(cases: list[Case]) -> None:
    by_name = {(case.group, case.name): case.median() for case in cases}
    plain, hints = by_name["into given memory", "cpu"], by_name["into given memory", "cpu + hints"]
    print(f"hints cost {100 * (hints / plain - 1):+.1f}% on top of quantizing")
    for group, name in [("quantize", "cpu + hints"), ("quantize", "cpu + values"), ("gather and dequantize", "cpu")]:
        reference = by_name[group, name.replace("cpu", "reference")]
        print(f"{group}, {name}: {reference / by_name[group, name]:.1f} times as fast as the torch reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.columns, dtype=torch.bfloat16)
    public, absent = public_cases(x)
    cases = [*quantize_cases(x), *public, *hint_cases(x), *gather_cases(x), *given_memory_cases(x)]
    copies = {traffic: copy_case(traffic) for traffic in sorted({case.traffic for case in cases})}
    measure([*cases, *copies.values()], options.repeats)
    print(f"{platform.machine()}, torch {torch.__version__}, BF16 [{options.rows}, {options.columns}], one thread")
    print_table(cases, copies)
    print_summary(cases)
    for reason in absent:
        print(f"not measured, {reason}")


if __name__ == "__main__":
    main()
