"""Table of the NVFP4 kernels on this CPU beside a memory copy and public CPU implementations, same data, same run.

    python benchmarks/bench_kernels.py [--rows 2048] [--large-rows 24576] [--columns 2048] [--repeats 15]

`ratio` is a kernel's time over that of copying memory with the same traffic (bytes read plus bytes written) to memory
that is mapped already. "given memory" is the kernel under the same conditions; "new results" is what callers see, where
large results also cost the system's mapping of their pages. `--rows` fits the last-level cache of most servers, where a
copy runs at that cache's speed; `--large-rows` does not fit, and there a copy is a copy of memory.

Times are CPU time of the one thread that everything runs in, so that other processes on the cores do not count. The
cases run in a new order every repeat, each right after its copy; ratios are taken within a repeat, and the spread is
their middle half.
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

import figures
import numpy as np
import torch

from trace_serve.kernels import cpu_decode, cpu_loops, get_kernels
from trace_serve.nvfp4.global_scale import pow2_fraction_and_bias
from trace_serve.recipe import BLOCK, E2M1_MAX, E4M3_MAX

CPU, REFERENCE = (get_kernels(name) for name in ("cpu", "reference"))
GIVEN, NEW = "given memory", "new results"


@dataclass
class Case:
    """One line of the table: `run` reads and writes `traffic` bytes."""

    group: str
    name: str
    traffic: int
    run: Callable[[], object]
    memory: str = NEW
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def new_result_cases(x: torch.Tensor, *, reference: bool) -> list[Case]:
    """What callers see: every call allocates its results."""
    rows, k = x.shape
    plain = x.nbytes + rows * (k // 2 + k // BLOCK + 4)
    hints, values = rows * k // 8, rows * k * 2
    cases = []
    for kernels in (CPU, REFERENCE) if reference else (CPU,):
        name = kernels.name
        for suffix, extra, options in [
            ("", 0, {}),
            (" + hints", hints, {"hints": True}),
            (", rotated by 64", 0, {"rotation": 64}),
        ]:
            run = partial(kernels.quantize_rows, x, **options)
            cases.append(Case("quantize", f"{name}{suffix}", plain + extra, run))
        cases.append(Case("quantize", f"{name} + values", plain + values, partial(kernels.fake_quantize_rows, x)))
    q = CPU.quantize_rows(x, global_scale=1.0)
    heads, dim = x.shape[1] // 64, 64
    codes, scales = q.codes.view(-1, heads, dim // 2), q.scales.view(-1, heads, dim // BLOCK)
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for kernels in (CPU, REFERENCE) if reference else (CPU,):
        run = partial(kernels.gather_dequantize, codes, scales, index, 1.0)
        cases.append(Case("gather and dequantize", kernels.name, codes.nbytes + scales.nbytes + values, run))
    if reference:
        for kernels in (CPU, REFERENCE):
            run = partial(kernels.hint_bits, codes)
            cases.append(Case("hint bits of packed codes", kernels.name, codes.nbytes + hints, run))
    return cases


def given_memory_cases(x: torch.Tensor) -> list[Case]:
    """The CPU loops into memory that is mapped already."""
    rows, k = x.shape
    codes, scales = torch.zeros(rows, k // 2, dtype=torch.uint8), torch.zeros(rows, k // BLOCK, dtype=torch.uint8)
    g, hints = torch.zeros(rows), torch.zeros(rows, k // BLOCK, dtype=torch.int16)
    values, counters = torch.zeros(rows, k, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    one = np.float32(1)
    fraction, bias = pow2_fraction_and_bias(E4M3_MAX)

    def quantize(mode: int, hint_words: torch.Tensor | None, kept: torch.Tensor | None) -> None:
        cpu_loops.quantize_rows(
            *(x.data_ptr(), rows, k, 2, 0, one, mode, one, one, one, fraction, bias, np.float32(E2M1_MAX * E4M3_MAX)),
            *(0, 0, False, False, codes.data_ptr(), scales.data_ptr(), g.data_ptr()),
            *(0 if tensor is None else tensor.data_ptr() for tensor in (hint_words, kept, counters)),
        )

    def gather() -> None:
        addresses = codes.data_ptr(), scales.data_ptr()
        cpu_decode.gather_dequantize(*addresses, rows, k, index.data_ptr(), rows, one, values.data_ptr())

    traffic = x.nbytes + codes.nbytes + scales.nbytes + g.nbytes
    token, static = cpu_loops.POW2_PER_TOKEN, cpu_loops.STATIC
    read = codes.nbytes + scales.nbytes
    return [
        Case("quantize", "cpu", traffic, partial(quantize, token, None, None), GIVEN),
        Case("quantize", "cpu + hints", traffic + hints.nbytes, partial(quantize, token, hints, None), GIVEN),
        Case("quantize", "cpu, static scale", traffic, partial(quantize, static, None, None), GIVEN),
        Case("quantize", "cpu + values", traffic + values.nbytes, partial(quantize, token, None, values), GIVEN),
        Case("gather and dequantize", "cpu", read + values.nbytes, gather, GIVEN),
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


class Copies:
    """Copies of memory with a given traffic."""

    def __init__(self, most: int) -> None:
        self._source = np.ones(most // 2, dtype=np.uint8)
        self._target = np.zeros(most // 2, dtype=np.uint8)

    def run(self, traffic: int) -> None:
        np.copyto(self._target[: traffic // 2], self._source[: traffic // 2])


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def measure(cases: list[Case], repeats: int) -> None:
    copies = Copies(max(case.traffic for case in cases))
    for case in cases:
        case.run()
    order = random.Random(0)
    for _ in range(repeats):
        for case in order.sample(cases, len(cases)):
            copies.run(case.traffic)
            copy = seconds(partial(copies.run, case.traffic))
            case.seconds.append(seconds(case.run))
            case.ratios.append(case.seconds[-1] / copy)


def print_table(title: str, cases: list[Case]) -> None:
    print(f"\n{title}")
    print(f"{'':44}{'memory':>14}{'median ms':>11}{'GB/s':>7}{'ratio':>8}{'middle half':>16}")
    for case in cases:
        middle = statistics.median(case.seconds)
        low, ratio, high = statistics.quantiles(case.ratios, n=4)
        print(
            f"  {case.group + ', ' + case.name:42}{case.memory:>14}{middle * 1e3:11.3f}"
            f"{case.traffic / middle / 1e9:7.1f}{ratio:8.2f}{f'{low:.2f}-{high:.2f}':>16}"
        )


def print_summary(cases: list[Case]) -> None:
    by_name = {(case.group, case.name, case.memory): case for case in cases}
    plain, hints = (by_name["quantize", name, GIVEN].seconds for name in ("cpu", "cpu + hints"))
    extra = [100 * (b / a - 1) for a, b in zip(plain, hints, strict=True)]
    low, middle, high = statistics.quantiles(extra, n=4)
    print(f"hints cost {middle:+.1f}% on top of quantizing ({low:+.1f} to {high:+.1f})")
    for group, name in [("quantize", "cpu + hints"), ("quantize", "cpu + values"), ("gather and dequantize", "cpu")]:
        reference = by_name.get((group, name.replace("cpu", "reference"), NEW))
        if reference is not None:
            times = statistics.median(reference.seconds) / statistics.median(by_name[group, name, NEW].seconds)
            print(f"{group}, {name}: {times:.0f} times as fast as the torch reference")


def told(cases: list[Case]) -> dict[str, str]:
    """What stands in the table of all benchmarks: loops over a copy, and other packers over ours."""
    found = {}
    ours = next(case for case in cases if (case.group, case.name, case.memory) == ("quantize", "cpu", NEW))
    for case in cases:
        if case.memory == GIVEN:
            low, middle, high = statistics.quantiles(case.ratios, n=4)
            found[f"{case.group}, {case.name}, over a copy of as many bytes: CPU time"] = (
                f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            )
        elif case.group == "quantize" and case.name.split()[0] not in ("cpu", "cpu,", "reference", "reference,"):
            ratios = [theirs / mine for theirs, mine in zip(case.seconds, ours.seconds, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            found[f"{case.name} over quantize, cpu: CPU time"] = f"{middle:.0f} [{low:.0f}, {high:.0f}]"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--large-rows", type=int, default=24576)
    parser.add_argument("--columns", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--repeats", type=int, default=15)
    figures.add_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread")
    large = torch.randn(options.large_rows, options.columns, dtype=torch.bfloat16)
    cases = [*given_memory_cases(large), *new_result_cases(large, reference=False)]
    measure(cases, options.repeats)
    print_table(f"beyond the caches: BF16 {list(large.shape)}, {large.nbytes >> 20} MiB", cases)
    print_summary(cases)
    x = large[: options.rows].clone()
    public, absent = public_cases(x)
    cases = [*given_memory_cases(x), *new_result_cases(x, reference=True), *public]
    measure(cases, options.repeats)
    print_table(f"in the caches: BF16 {list(x.shape)}, {x.nbytes >> 20} MiB", cases)
    print_summary(cases)
    figures.write(options.figures, told(cases))
    for reason in absent:
        print(f"not measured, {reason}")


if __name__ == "__main__":
    main()
