"""Time and memory of `eval-gate compare` on recorded results: python benchmarks/bench_compare.py [--queries 100000].

Writes two files of a gate run's records (about 1 KB each, with request and response), then runs the command as a user
would, in a process of its own, and reports wall-clock time, CPU time and peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures


def write_results(path: Path, role: str, queries: int, lost: float, seed: int) -> None:
    draw = random.Random(seed)
    filler = "The answer follows from the numbers given in the question above. " * 3
    with path.open("w", encoding="utf-8") as out:
        for index in range(queries):
            passed = index % 5 != 0 and draw.random() > lost
            text = f"{filler}It is {index if passed else -1}."
            record = {
                "record": "sample",
                "key": f"sha256:{index:064x}",
                "query_id": f"query-{index}",
                "role": role,
                "sample": 0,
                "request": {"messages": [{"role": "user", "content": f"Question {index}: {filler}"}], "max_tokens": 64},
                "response": {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]},
                "text": text,
                "finish_reason": "stop",
                "prompt_tokens": 60,
                "completion_tokens": 48,
                "latency_s": 0.5,
                "attempts": 1,
                "passed": passed,
                "extracted": None,
                "failure": None,
            }
            out.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=100_000, help="results in each of the two files")
    parser.add_argument("--lost", type=float, default=0.02, help="share of queries that the serving arm loses")
    figures.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        one, two = Path(directory, "a.jsonl"), Path(directory, "b.jsonl")
        write_results(one, "training", options.queries, 0.01, 1)
        write_results(two, "serving", options.queries, 0.01 + options.lost, 2)
        size = (one.stat().st_size + two.stat().st_size) / 2**20
        command = [sys.executable, "-m", "eval_gate.cli", "compare", str(one), str(two), "--json"]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1, 2):
        sys.exit(done.stderr)
    verdict = json.loads(done.stdout)
    print(f"{2 * options.queries} results, {size:.0f} MiB: {verdict['outcome']}, {len(verdict['flipped'])} flipped")
    print(
        f"wall {wall:.2f} s, CPU {usage.ru_utime + usage.ru_stime:.2f} s, peak memory {usage.ru_maxrss / 2**10:.0f} MiB"
    )
    what = f"`eval-gate compare` of {2 * options.queries:,} results: seconds, peak MiB"
    figures.write(options.figures, {what: f"{wall:.1f} s, {usage.ru_maxrss / 2**10:.0f} MiB"})


if __name__ == "__main__":
    main()
