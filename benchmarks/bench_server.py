"""What the front-end costs: beside SGLang's own port, and beside other gateways on a null upstream.

    .venv/bin/python benchmarks/bench_server.py [--part engine|null] [--rounds 6] [--policy DIR] [--json FILE]

`engine`: one real engine with the sample policy; requests go to its own port and through the front-end in turns.
`null`: an upstream that streams 64 tokens and computes nothing; requests go to it directly and through trace-serve,
LiteLLM's proxy and smg (SGLang's gateway, in Rust), the last two in virtual environments made and removed here (1 GB).

Every server in front of the upstream runs as one process pinned to one core, the load generator and the null upstream
on another. Arms take turns in short blocks, forwards and backwards, so that a change of the machine's load falls on all
of them; a ratio is formed within each round and reported as its median over rounds with a 95% bootstrap interval. The
server's CPU time a request is reported beside the clock, which on a shared machine mostly measures the neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench_server_targets as targets
import figures
import psutil
from bench_server_stats import Block, compare
from bench_server_targets import Target
from bench_server_upstream import CONTEXT_LENGTH, MODEL, VOCAB_SIZE

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.policy.build import build_policy
from trace_serve.policy.digest import digest_directory
from trace_serve.policy.manifest import load_policy
from trace_serve.policy.sample import build_sample_model
from trace_serve.recipe import PRESETS

DIRECT, TRACE_SERVE = "direct", "trace-serve"
PROMPTS = tuple(f"Question {number}: what is {number} plus {3 * number}? Answer in words." for number in range(32))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bodies(model: str, tokens: int) -> list[dict[str, Any]]:
    options = {"stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return [{"model": model, "messages": [{"role": "user", "content": text}], **options} for text in PROMPTS]


def block(part: str, target: Target, concurrency: int, number: int, tokens: int, **until: float) -> Block:
    """Runs one block in a load generator of its own; `until` is `count` requests or `seconds`."""
    script = Path(__file__).with_name("bench_server_load.py")
    order = {"url": target.url, "key": target.key, "bodies": bodies(target.model, tokens), **until}
    order["concurrency"] = concurrency
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        cpu_s = target.cpu_s()
        subprocess.run(
            [sys.executable, str(script), out.name],
            input=json.dumps(order),
            text=True,
            check=True,
            timeout=900,
            preexec_fn=lambda: os.sched_setaffinity(0, {targets.LOAD_CORE}),
        )
        cpu_s = target.cpu_s() - cpu_s
        seen = json.loads(Path(out.name).read_text())
    first, total = tuple(seen["first_s"]), tuple(seen["total_s"])
    done = Block(part, target.name, concurrency, number, len(total), seen["wall_s"], cpu_s, first, total)
    say(
        f"{part} round {number} concurrency {concurrency} {target.name}: {done.per_second:.1f} requests/s, first event "
        f"p50 {done.first_ms(0.5):.1f} ms, {done.cpu_ms:.2f} CPU ms a request"
    )
    return done


def in_turns(arms: list[Target], number: int) -> list[Target]:
    return arms if number % 2 else arms[::-1]


def measure_engine(policy: Path, directory: Path, options: argparse.Namespace) -> list[Block]:
    say("starting the engine")
    config = EngineConfig(
        model=policy,
        recipe=load_policy(policy).recipe,
        log_path=directory / "engine.log",
        max_running_requests=max(options.concurrency),
    )
    engine = EngineProcess(config)
    engine.start()
    try:
        engine.wait_ready(600)
        processes = (psutil.Process(engine.pid),)
        direct = Target(DIRECT, engine.url + "/v1/chat/completions", engine.served_name, engine.api_key, processes)
        name = load_policy(policy).name
        with targets.trace_serve(policy, directory, engine.url, name, key=engine.api_key, core=None) as front:
            front = replace(front, processes=front.processes + processes)
            blocks = []
            for number in range(options.rounds + 1):  # the first one warms up
                for concurrency in options.concurrency:
                    for target in in_turns([direct, front], number):
                        count = max(10, 2 * concurrency)
                        done = block("engine", target, concurrency, number, options.tokens, count=count)
                        blocks += [done] if number else []
            return blocks
    finally:
        engine.stop()


def measure_null(policy: Path, directory: Path, options: argparse.Namespace) -> list[Block]:
    manifest = load_policy(policy)
    report = {
        "recipe_id": manifest.recipe.recipe_id,
        "policy_digest": digest_directory(policy),
        "context_length": CONTEXT_LENGTH,
        "vocab_size": VOCAB_SIZE,
    }
    blocks: list[Block] = []
    with contextlib.ExitStack() as stack:
        venvs = {name: stack.enter_context(targets.venv_with(name, directory)) for name in options.beside}
        for part, interval_ms, levels in (
            ("burst", 0.0, options.concurrency),
            ("paced", options.interval_ms, options.concurrency[-1:]),
        ):
            with contextlib.ExitStack() as servers:
                upstream = servers.enter_context(targets.null_upstream(directory, 64, interval_ms, report))
                core = targets.SERVER_CORE
                started = [targets.trace_serve(policy, directory, upstream, manifest.name, core=core)]
                if targets.LITELLM in venvs:
                    started.append(targets.litellm(venvs[targets.LITELLM], directory, upstream, MODEL))
                if targets.SMG in venvs:
                    started.append(targets.smg(venvs[targets.SMG], directory, upstream, MODEL))
                arms = [Target(DIRECT, upstream + "/v1/chat/completions", MODEL)]
                arms += [servers.enter_context(each) for each in started]
                for number in range(options.rounds + 1):
                    for concurrency in levels:
                        for target in in_turns(arms, number):
                            done = block(part, target, concurrency, number, 64, seconds=options.seconds)
                            blocks += [done] if number else []
    return blocks


def rows(blocks: list[Block]) -> list[str]:
    """One line for each arm at each concurrency; CPU time is that of the servers, in `engine` with the engine's."""
    lines = [
        "| concurrency | | requests/s | over direct | first event p50, p99 | added at p50, ms | whole answer p50, ms | "
        "CPU ms a request |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for concurrency in sorted({each.concurrency for each in blocks}):
        level = [each for each in blocks if each.concurrency == concurrency]
        for arm in dict.fromkeys(each.arm for each in sorted(level, key=lambda each: each.arm != DIRECT)):
            mine = [each for each in level if each.arm == arm]
            over = compare(level, arm, DIRECT, lambda each: each.per_second).text(2)
            added = compare(level, arm, DIRECT, lambda each: each.first_ms(0.5), ratio=False).text(1)
            cpu = middle([each.cpu_ms for each in mine], 2)
            cells = [
                str(concurrency),
                arm,
                middle([each.per_second for each in mine]),
                "" if arm == DIRECT else over,
                ", ".join(middle([each.first_ms(share) for each in mine]) for share in (0.5, 0.99)),
                "" if arm == DIRECT else added,
                middle([each.total_ms(0.5) for each in mine]),
                cpu if float(cpu) else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def middle(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f}"


def engine_cpu(blocks: list[Block]) -> list[str]:
    """CPU time of front-end and engine together over that of the engine asked directly."""
    lines = ["| concurrency | CPU time through trace-serve over direct |", "|---|---|"]
    for concurrency in sorted({each.concurrency for each in blocks}):
        level = [each for each in blocks if each.concurrency == concurrency]
        lines.append(f"| {concurrency} | {compare(level, TRACE_SERVE, DIRECT, lambda each: each.cpu_ms).text(2)} |")
    return lines


def against(blocks: list[Block]) -> list[str]:
    """trace-serve over each of the others: by requests a second, and by requests a CPU second of the server."""
    lines = ["| | trace-serve over | requests/s | requests a CPU second |", "|---|---|---|---|"]
    for part, concurrency in sorted({(each.part, each.concurrency) for each in blocks}):
        level = [each for each in blocks if (each.part, each.concurrency) == (part, concurrency)]
        for other in dict.fromkeys(each.arm for each in level if each.arm not in (DIRECT, TRACE_SERVE)):
            speed = compare(level, TRACE_SERVE, other, lambda each: each.per_second)
            cpu = compare(level, TRACE_SERVE, other, lambda each: 1 / each.cpu_ms)
            lines.append(f"| {part}, concurrency {concurrency} | {other} | {speed.text(2)} | {cpu.text(2)} |")
    return lines


def told(blocks: list[Block]) -> dict[str, str]:
    """What stands in the table of all benchmarks."""
    found = {}
    for part, concurrency in sorted({(each.part, each.concurrency) for each in blocks}):
        level = [each for each in blocks if (each.part, each.concurrency) == (part, concurrency)]
        for other in dict.fromkeys(each.arm for each in level if each.arm != TRACE_SERVE):
            speed = compare(level, TRACE_SERVE, other, lambda each: each.per_second)
            base = "asked directly" if other == DIRECT else other
            found[f"front-end over {base}, {part}, {concurrency} clients: requests/s"] = speed.text(2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["engine", "null"], help="one part alone")
    parser.add_argument("--policy", type=Path, help="policy directory; without it the sample policy is built")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count; one more warms up")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block on the null upstream")
    parser.add_argument("--tokens", type=int, default=16, help="output tokens of a request to the engine")
    parser.add_argument("--interval-ms", type=float, default=10.0, help="time between tokens, paced null upstream")
    parser.add_argument(
        "--beside", nargs="*", default=[targets.LITELLM, targets.SMG], help="other gateways, as pip requirements"
    )
    parser.add_argument("--json", type=Path, help="file that receives every block")
    figures.add_option(parser)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    blocks: list[Block] = []
    with tempfile.TemporaryDirectory(prefix="trace-serve-bench-") as scratch:
        directory = Path(scratch)
        policy = options.policy
        if policy is None:
            model = build_sample_model(directory / "sample", progress=say)
            policy = directory / "policy"
            build_policy(model, policy, name="sample", version="1", recipe=PRESETS["default"])
        if options.part != "engine":
            blocks += measure_null(policy, directory, options)
        if options.part != "null":
            blocks += measure_engine(policy, directory, options)
    loads = f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"{os.cpu_count()} cores, {platform.machine()}, {loads}; {options.rounds} rounds; medians [95% intervals].")
    for part in dict.fromkeys(each.part for each in blocks):
        print(f"\n{part}\n")
        mine = [each for each in blocks if each.part == part]
        print("\n".join(rows(mine)))
        if part == "engine":
            print("\n" + "\n".join(engine_cpu(mine)))
    beside = [each for each in blocks if each.part != "engine"]
    if {each.arm for each in beside} - {DIRECT, TRACE_SERVE}:
        print("\n" + "\n".join(against(beside)))
    figures.write(options.figures, told(blocks))
    if options.json is not None:
        temporary = options.json.with_name(f".{options.json.name}.partial")
        temporary.write_text(json.dumps([asdict(each) for each in blocks]))
        temporary.replace(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
