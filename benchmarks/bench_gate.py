"""What the gate adds to the time of its arms: python benchmarks/bench_gate.py [--queries 1600] [--rounds 3].

A server in a process of its own answers after a seeded latency, as a model would. The same requests are sent once by a
loop that does nothing else and once by `eval-gate run`, at the same concurrency; both arms are that one server. Start
and end of the command are in its time: they weigh most in short runs, so a run of two queries is timed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import figures
from aiohttp import web


def serve(port: multiprocessing.Queue[int], mean_s: float) -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["messages"][-1]["content"]
        await asyncio.sleep(random.Random(prompt).uniform(0.5, 1.5) * mean_s)
        text = "Step by step, one finds the number asked for. " * 12 + f"It is {prompt.split()[0]}."
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 20, "completion_tokens": 130}})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "bench"}]})

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.contextmanager
def server(mean_s: float) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    port: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=serve, args=(port, mean_s), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=60)}"
    finally:
        process.terminate()
        process.join()


def plain_loop(url: str, queries: int, concurrency: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    before = time.process_time()
    wall = asyncio.run(send_all(url, queries, concurrency))
    return wall, time.process_time() - before


async def send_all(url: str, queries: int, concurrency: int) -> float:
    slots = asyncio.Semaphore(concurrency)
    started = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            body = {"model": "bench", "messages": [{"role": "user", "content": prompt(number)}], "max_tokens": 200}
            async with slots, session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()

        for _ in range(2):
            await asyncio.gather(*(one(number) for number in range(queries)))
    return time.monotonic() - started


def prompt(number: int) -> str:
    return f"{number} is which number?"


def gate(url: str, queries: Path, out: Path, concurrency: int, *options: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds, its checker processes included."""
    command = [
        *(sys.executable, "-m", "eval_gate.cli", "run", "--training", url, "--serving", url, "--allow-unproven"),
        *("--queries", str(queries), "--out", str(out), "--concurrency", str(concurrency), *options),
    ]
    before = cpu_of_children()
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.monotonic() - started
    if done.returncode not in (0, 2):
        sys.exit(done.stdout + done.stderr)
    return wall, cpu_of_children() - before


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1600)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--latency", type=float, default=1.0, help="mean seconds of one answer")
    parser.add_argument("--rounds", type=int, default=3)
    figures.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, server(options.latency) as url:
        queries = Path(directory, "q.jsonl")
        rows = [
            {"id": f"q{i}", "prompt": prompt(i), "max_tokens": 200, "checker": {"type": "numeric", "expected": i}}
            for i in range(options.queries)
        ]
        queries.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        shares, fixed = [], []
        for turn in range(options.rounds):
            small, _ = gate(url, queries, Path(directory, f"small{turn}"), options.concurrency, "--max-queries", "2")
            fixed.append(small - 2 * options.latency)
            loop, loop_cpu = plain_loop(url, options.queries, options.concurrency)
            whole, whole_cpu = gate(url, queries, Path(directory, f"out{turn}"), options.concurrency)
            shares.append(100 * (whole - loop) / loop)
            print(
                f"loop {loop:.2f} s (CPU {loop_cpu:.2f} s), gate {whole:.2f} s (CPU {whole_cpu:.2f} s): "
                f"{shares[-1]:+.1f}%; start and end alone {fixed[-1]:.2f} s",
                flush=True,
            )
    print(
        f"{2 * options.queries} requests, {options.concurrency} in flight, {options.latency:g} s each: the gate adds "
        f"{statistics.median(shares):.1f}% ({min(shares):.1f} to {max(shares):.1f}), its start and end alone "
        f"{statistics.median(fixed):.2f} s"
    )
    what = f"`eval-gate run` over a loop that only sends, {options.latency:g} s a request: time"
    figures.write(options.figures, {what: figures.spread([1 + share / 100 for share in shares], 3)})


if __name__ == "__main__":
    main()
