"""Every benchmark of the project, one after another, and the table of their figures in docs/benchmarks.md.

    .venv/bin/python benchmarks/bench_all.py [--only kernels engine ...] [--quick] [--out runs/benchmarks]

Each benchmark keeps its full output and its figures in `--out`; the page is made of what is there, so that one can be
run again alone. About 50 minutes on two idle cores, a third of that with `--quick` (fewer rounds, no other gateways).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from trace_serve.policy.build import build_policy
from trace_serve.policy.sample import build_sample_model
from trace_serve.recipe import PRESETS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/benchmarks.md"
NO_CARD = 2

HEAD = """\
# Benchmarks

Written by `make bench`, which runs them all; with `BENCH_ARGS="--only engine"` it runs one of them again. What each one
does is on its own page: [kernels](kernels.md), [engine](engine-speed.md), [front-end](server-speed.md),
[arms and load](load-tests.md), [gate and compare](gate-statistics.md).

A value is a ratio unless it has a unit. Ratios are formed between arms that took turns in one run, and are given as
median [spread] over its rounds: the middle half for kernels, a 95% bootstrap interval for the front-end and the arms,
the smallest and the largest round for the others. Where the machine carries other work, the clock measures that too.
Figures of the CPU engine say what emulation costs, and nothing about a card.
"""


@dataclass(frozen=True)
class Benchmark:
    """One script: its arguments, those of a quick run, and whether it wants the sample model and policy."""

    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    model: str = ""
    policy: str = ""


BENCHMARKS = {
    "kernels": Benchmark("bench_kernels"),
    "engine": Benchmark("bench_engine", quick=("--repeats=3", "--concurrency", "1", "8"), model="--model"),
    "arms": Benchmark("bench_arms", quick=("--rounds=3",), model="--model", policy="--policy"),
    "front-end": Benchmark(
        "bench_server", quick=("--part=engine", "--rounds=3", "--concurrency", "1", "8"), policy="--policy"
    ),
    "load": Benchmark("bench_load", quick=("--rounds=3",), model="--tokenizer"),
    "load, engine": Benchmark("bench_load", quick=("--rounds=3",), model="--tokenizer", policy="--policy"),
    "gate": Benchmark("bench_gate", quick=("--queries=800",)),
    "compare": Benchmark("bench_compare"),
    "gpu": Benchmark("bench_gpu"),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(name: str, benchmark: Benchmark, quick: bool, sample: Path, out: Path) -> None:
    """Leaves `<name>.txt` and `<name>.json`, and raises what ends the script other than for want of a card."""
    told = out / f"{name}.figures"
    words = [*benchmark.arguments, *(benchmark.quick if quick else ())]
    for option, directory in ((benchmark.model, "model"), (benchmark.policy, "policy")):
        words += [f"{option}={sample / directory}"] if option else []
    words += [f"--figures={told}"] if name != "gpu" else []
    before, begin = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, str(HERE / f"{benchmark.script}.py"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    (out / f"{name}.txt").write_text(done.stdout)
    if name == "gpu" and done.returncode == NO_CARD:
        figures = {"Triton kernels over a copy on a card": "not measured: no card here"}
    else:
        done.check_returncode()
        figures = json.loads(told.read_text()) if told.exists() else {"Triton kernels": f"see {name}.txt"}
    told.unlink(missing_ok=True)
    record = {
        "figures": figures,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "minutes": (time.monotonic() - begin) / 60,
        "load": [before, os.getloadavg()[0]],
        "quick": quick,
        "machine": machine(),
    }
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "sglang", "trace-serve"))
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, {memory:.0f} GiB, Python {platform.python_version()}, {versions}"


def page(out: Path) -> str:
    """The page of the records in a directory."""
    records = {name: json.loads(path.read_text()) for name in BENCHMARKS if (path := out / f"{name}.json").exists()}
    machines = dict.fromkeys(record["machine"] for record in records.values())
    lines = [HEAD, *(f"Machine: {each}.\n" for each in machines)]
    lines += ["| benchmark | figure | value |", "|---|---|---|"]
    for name, record in records.items():
        lines += [f"| {name} | {what} | {value} |" for what, value in record["figures"].items()]
    lines += ["", "| benchmark | run on | minutes | load average before, after | rounds |", "|---|---|---|---|---|"]
    for name, record in records.items():
        before, after = record["load"]
        rounds = "quick" if record["quick"] else "full"
        lines.append(f"| {name} | {record['date']} | {record['minutes']:.1f} | {before:.1f}, {after:.1f} | {rounds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no other gateways beside the front-end")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sample = options.out / "sample"
    if any(BENCHMARKS[name].model or BENCHMARKS[name].policy for name in options.only) and not sample.exists():
        making = options.out / "sample.partial"
        build_sample_model(making / "model", progress=say)
        build_policy(making / "model", making / "policy", name="sample", version="1", recipe=PRESETS["default"])
        making.rename(sample)
    for number, name in enumerate(options.only, 1):
        say(f"[{number}/{len(options.only)}] {name}")
        run(name, BENCHMARKS[name], options.quick, sample, options.out)
        PAGE.write_text(page(options.out))
    say(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
