"""BF16 and FP4 engines side by side on this CPU: tokens a second, what hints cost, memory, and the time to start.

    .venv/bin/python benchmarks/bench_engine.py [--model DIR] [--repeats 4] [--json FILE]

Both engines stay up and take turns in short blocks (A B C, then C B A, and so on), so that a change of the machine's
load falls on all of them; a ratio is formed within each round and reported as median [smallest, largest]. On a shared
machine the wall clock mostly measures the neighbours, so the scheduler's own CPU time is reported beside it. The table
is Markdown on stdout; progress goes to stderr. About five minutes for the sample model on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import figures
import psutil

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.policy.sample import build_sample_model
from trace_serve.recipe import PRESETS, Recipe

BF16, FP4, HINTS = "BF16", "FP4", "FP4 with hints"
ARMS = (BF16, FP4, HINTS)
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Block:
    """One arm, one concurrency, one round: output tokens, wall seconds, CPU seconds of the scheduler."""

    arm: str
    concurrency: int
    round: int
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.wall_s

    @property
    def per_cpu_second(self) -> float:
        return self.tokens / self.cpu_s


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of a ratio over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def scheduler_of(engine: EngineProcess) -> psutil.Process:
    assert engine.pid is not None
    children = psutil.Process(engine.pid).children(recursive=True)
    return next(child for child in children if "scheduler" in child.name() or "schedul" in " ".join(child.cmdline()))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    """Distinct token ids without a shared prefix, so that the prefix cache serves nobody."""
    return [3 + (seed * 7919 + i * 104729) % (vocabulary - 3) for i in range(length)]


def run_block(
    engine: EngineProcess, arm: str, concurrency: int, number: int, arguments: argparse.Namespace, vocabulary: int
) -> Block:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": arguments.tokens, "ignore_eos": True}
    if arm == HINTS:
        sampling["custom_params"] = {"trace_hints": "file"}

    def one(i: int) -> None:
        # A prompt of its own for every request of the run: nothing is served from the prefix cache.
        seed = (ARMS.index(arm) * 1009 + number) * 4096 + concurrency * 64 + i
        body = {"input_ids": prompt(seed, arguments.prompt, vocabulary), "sampling_params": sampling}
        engine.request("/generate", body, timeout_s=600)

    process = scheduler_of(engine)
    cpu, wall = cpu_seconds(process), time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(one, range(concurrency)))
    wall, cpu = time.monotonic() - wall, cpu_seconds(process) - cpu
    return Block(arm, concurrency, number, concurrency * arguments.tokens, wall, cpu)


def ratios(blocks: list[Block], concurrency: int, arm: str, base: str) -> tuple[Spread, Spread]:
    """Tokens a second, and tokens a CPU second, of `arm` over `base`, round by round."""
    found = {(b.arm, b.round): b for b in blocks if b.concurrency == concurrency}
    rounds = sorted({number for _, number in found})
    pairs = [(found[arm, number], found[base, number]) for number in rounds]
    return (
        Spread.of(a.per_second / b.per_second for a, b in pairs),
        Spread.of(a.per_cpu_second / b.per_cpu_second for a, b in pairs),
    )


def speed_table(blocks: list[Block]) -> list[str]:
    lines = [
        "| concurrency | BF16 tok/s | FP4 tok/s | FP4 / BF16 | by CPU time | hints on / off | by CPU time |",
        "|---|---|---|---|---|---|---|",
    ]
    for concurrency in sorted({block.concurrency for block in blocks}):
        mine = [block for block in blocks if block.concurrency == concurrency]
        speeds = [statistics.median(b.per_second for b in mine if b.arm == arm) for arm in (BF16, FP4)]
        fp4, fp4_cpu = ratios(blocks, concurrency, FP4, BF16)
        hints, hints_cpu = ratios(blocks, concurrency, HINTS, FP4)
        lines.append(
            f"| {concurrency} | {speeds[0]:.1f} | {speeds[1]:.1f} | {fp4} | {fp4_cpu} | {hints} | {hints_cpu} |"
        )
    return lines


def memory_table(reports: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| | BF16 | FP4 | FP4 / BF16 |", "|---|---|---|---|"]
    bf16, fp4 = reports[BF16], reports[FP4]
    rows = [("KV bytes a token", bf16["kv"]["bytes_per_token"], fp4["kv"]["bytes_per_token"])]
    for name, key in (("weights, packed", "weights_bytes_packed"), ("KV pool", "kv_bytes")):
        rows.append((f"{name}, bytes", bf16["memory"][key], fp4["memory"][key]))
    rows.append(("weights and KV, bytes", bf16["memory"]["total_bytes_packed"], fp4["memory"]["total_bytes_packed"]))
    lines += [f"| {name} | {a:,} | {b:,} | {b / a:.3f} |" for name, a, b in rows]
    experts = fp4["memory"]["experts_bytes_packed"] / fp4["memory"]["experts_bytes_bf16"]
    return [*lines, f"| experts alone, packed over BF16 | | | {experts:.3f} |"]


def start_table(ready: dict[str, float], reports: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| seconds to ready | BF16 | FP4 |", "|---|---|---|"]
    lines.append(f"| all | {ready[BF16]:.1f} | {ready[FP4]:.1f} |")
    phases = {arm: reports[arm]["startup"]["phases_s"] for arm in (BF16, FP4)}
    for name in phases[BF16]:
        lines.append(f"| {name} | {phases[BF16][name]:.1f} | {phases[FP4].get(name, 0.0):.1f} |")
    rest = {arm: ready[arm] - sum(phases[arm].values()) for arm in phases}
    return [*lines, f"| HTTP server and first request | {rest[BF16]:.1f} | {rest[FP4]:.1f} |"]


def start(arm: str, model: Path, recipe: Recipe | None, directory: Path) -> tuple[EngineProcess, float, dict[str, Any]]:
    say(f"starting {arm}")
    slug = arm.lower()
    engine = EngineProcess(
        EngineConfig(
            model=model,
            recipe=recipe,
            hint_dir=directory / f"hints-{slug}",
            log_path=directory / f"{slug}.log",
            policy_digest="sha256:" + "0" * 64,
        )
    )
    begin = time.monotonic()
    engine.start()
    report = engine.wait_ready(START_TIMEOUT_S)
    ready = time.monotonic() - begin
    say(f"{arm} is ready after {ready:.1f} s")
    return engine, ready, report


def measure(engines: dict[str, EngineProcess], arguments: argparse.Namespace, vocabulary: int) -> list[Block]:
    blocks: list[Block] = []
    for number in range(-1, arguments.repeats):
        for concurrency in arguments.concurrency:
            # A round before the first warms allocators and caches and is not counted.
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                block = run_block(engines[arm], arm, concurrency, number, arguments, vocabulary)
                say(
                    f"round {number + 1}/{arguments.repeats} concurrency {concurrency} {arm}: "
                    f"{block.per_second:.1f} tok/s, {block.per_cpu_second:.1f} a CPU second"
                )
                if number >= 0:
                    blocks.append(block)
    return blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory; without it the sample model is built")
    parser.add_argument("--recipe", default="default", choices=[name for name in PRESETS if name != "bf16"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=4, help="rounds that count; one more warms up")
    parser.add_argument("--tokens", type=int, default=24, help="output tokens a request")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens a request")
    parser.add_argument("--json", type=Path, help="file that receives every block and both reports")
    figures.add_option(parser)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="trace-serve-bench-") as scratch:
        directory = Path(scratch)
        model = arguments.model or build_sample_model(directory / "sample", progress=say)
        engines: dict[str, EngineProcess] = {}
        ready, reports = {}, {}
        try:
            for arm, recipe in ((BF16, None), (FP4, PRESETS[arguments.recipe])):
                engines[arm], ready[arm], reports[arm] = start(arm, model, recipe, directory)
            engines[HINTS] = engines[FP4]
            blocks = measure(engines, arguments, reports[FP4]["vocab_size"])
        finally:
            for arm in (BF16, FP4):
                if arm in engines:
                    engines[arm].stop()
    loads = f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, {loads}; {arguments.repeats} rounds, prompts of "
        f"{arguments.prompt} tokens, answers of {arguments.tokens}; ratios are median [smallest, largest] over rounds."
    )
    for table in (speed_table(blocks), memory_table(reports), start_table(ready, reports)):
        print("\n" + "\n".join(table))
    told = {}
    for concurrency in arguments.concurrency:
        for what, arm, base in (
            ("FP4 over BF16 engine", FP4, BF16),
            ("FP4 engine, hints over none", HINTS, FP4),
        ):
            wall, cpu = ratios(blocks, concurrency, arm, base)
            told[f"{what}, {concurrency} at once: tokens/s"] = str(wall)
            told[f"{what}, {concurrency} at once: tokens a CPU second"] = str(cpu)
    figures.write(arguments.figures, told)
    if arguments.json is not None:
        content = {"blocks": [asdict(block) for block in blocks], "ready_s": ready, "reports": reports}
        temporary = arguments.json.with_name(f".{arguments.json.name}.partial")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
