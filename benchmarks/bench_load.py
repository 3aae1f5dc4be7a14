"""`trace-serve load` beside SGLang's own benchmark, in turns on one server with one workload: a check of the figures.

    .venv/bin/python benchmarks/bench_load.py --tokenizer DIR [--policy DIR | --url URL --model NAME] [--rounds 4]

Without `--url` or `--policy` the server is one of known delays: 200 ms to the first of 32 tokens, 20 ms between them;
`--policy` starts a front-end and a real engine. Both tools run
a closed loop of the same number of clients over like prompts with the same answer length, forwards and backwards;
ratios are formed within a round. `--tokenizer` is any model directory: SGLang's benchmark counts prompt tokens itself.
The key of the server is read from TRACE_SERVE_API_KEY.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import figures

from trace_serve.load.plan import make_plan
from trace_serve.load.runner import run_plan
from trace_serve.load.workloads.words import text
from trace_serve.policy.manifest import load_policy
from trace_serve.server.process import ServerProcess

KNOWN = Path(__file__).parent.parent / "tests" / "load" / "known_server.py"
SCRIPT = "first=0.2 gap=0.02 tokens=32"
TOKENS = 32
START_TIMEOUT_S = 600.0
FIGURES = ("TTFT p50 ms", "TTFT mean ms", "TPOT p50 ms", "TPOT mean ms", "requests/s", "tokens/s")
OURS, THEIRS = "trace-serve load", "sglang.benchmark.serving"
Figures = dict[str, float]


@contextlib.contextmanager
def known_server() -> Iterator[str]:
    with subprocess.Popen([sys.executable, str(KNOWN)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def serve(policy: Path, directory: Path) -> ServerProcess:
    server = ServerProcess(
        policy, mode="rollout", api_key=os.environ["TRACE_SERVE_API_KEY"], log_path=directory / "server.log"
    )
    server.start()
    try:
        server.wait_ready(START_TIMEOUT_S)
    except BaseException:
        server.stop()
        raise
    return server


def ours(url: str, prompts: list[str], options: argparse.Namespace, directory: Path) -> Figures:
    queries = directory / "queries.jsonl"
    queries.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    given = {"users": options.clients, "duration": options.seconds, "queries": str(queries), "seed": 0}
    given |= {"max_tokens": TOKENS, "ignore_eos": True, "model": options.model}
    report = run_plan(make_plan(given), url, directory / "ours")
    ttft, tpot = report.latency("ttft_sent"), report.latency("tpot")
    if report.exit_code or ttft is None or tpot is None:
        sys.exit(f"the run is {report.verdict.value}: {report.reasons} {report.invalid}")
    latencies = (ttft.quantiles["50"], ttft.mean, tpot.quantiles["50"], tpot.mean)
    return dict(zip(FIGURES, (*latencies, report.requests_per_s, report.tokens_per_s), strict=True))


def theirs(url: str, prompts: list[str], options: argparse.Namespace, directory: Path, count: int) -> Figures:
    data = directory / "prompts.jsonl"
    turns = [[{"content": prompt}, {"content": "an answer of some words"}] for prompt in prompts]
    lines = [json.dumps({"conversations": turn}) + "\n" for turn in turns]
    data.write_text("".join(lines[index % len(lines)] for index in range(count)))
    out = directory / "theirs.jsonl"
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang-oai-chat", "--base-url", url]
    command += ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", str(count)]
    command += ["--sharegpt-output-len", str(TOKENS), "--max-concurrency", str(options.clients), "--disable-tqdm"]
    command += ["--model", options.model or "known", "--tokenizer", str(options.tokenizer), "--output-file", str(out)]
    key = os.environ.get("TRACE_SERVE_API_KEY", "")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OPENAI_API_KEY": key}
    )
    if done.returncode or not out.exists():
        sys.exit(f"{THEIRS} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    told = json.loads(out.read_text().splitlines()[-1])
    names = ("median_ttft_ms", "mean_ttft_ms", "median_tpot_ms", "mean_tpot_ms")
    latencies = (float(told[name]) for name in names)
    return dict(zip(FIGURES, (*latencies, told["request_throughput"], told["output_throughput"]), strict=True))


def table(rounds: list[tuple[Figures, Figures]]) -> str:
    lines = [f"| | {OURS} | {THEIRS} | ratio, median [least, most] |", "|---|---|---|---|"]
    for name in FIGURES:
        a, b = ([each[side][name] for each in rounds] for side in (0, 1))
        ratios = [one / other for one, other in zip(a, b, strict=True)]
        spread = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
        lines.append(f"| {name} | {statistics.median(a):.2f} | {statistics.median(b):.2f} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="a running server; default one of known delays")
    parser.add_argument("--policy", type=Path, help="policy directory, served by a real engine")
    parser.add_argument("--model", default="", help="what requests call the model")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--json", type=Path)
    figures.add_option(parser)
    options = parser.parse_args()
    real = bool(options.url or options.policy)

    def prompts(run: int) -> list[str]:
        """Others for each run, so that no run is served from the prefix cache that another one filled."""
        return [text([run, index], 24) for index in range(64)] if real else [SCRIPT]

    rounds: list[tuple[Figures, Figures]] = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.policy is not None:
            os.environ.setdefault("TRACE_SERVE_API_KEY", secrets.token_hex(16))
            server = serve(options.policy, directory)
            stack.callback(server.stop)
            options.url, options.model = server.url, load_policy(options.policy).manifest.name
        url = options.url or stack.enter_context(known_server())
        count = 4 * options.clients
        for number in range(options.rounds):
            place = directory / str(number)
            place.mkdir()
            second = theirs(url, prompts(2 * number), options, place, count) if number % 2 else None
            first = ours(url, prompts(2 * number + 1), options, place)
            count = max(round(first["requests/s"] * options.seconds), options.clients)
            second = second or theirs(url, prompts(2 * number), options, place, count)
            rounds.append((first, second))
            print(f"round {number + 1}: {first}\n         {second}", file=sys.stderr, flush=True)
    busy = os.getloadavg()[0]
    print(f"{options.clients} clients, {options.rounds} rounds of {options.seconds:g} s, load average {busy:.1f}")
    print(table(rounds))
    ratios = {name: [ours[name] / theirs[name] for ours, theirs in rounds] for name in FIGURES}
    server = "a real engine" if real else "a server of known delays"
    told = {f"{OURS} over {THEIRS}, {server}: {name}": figures.spread(each, 3) for name, each in ratios.items()}
    figures.write(options.figures, told)
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
