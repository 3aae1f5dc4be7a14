"""`trace-serve load` comparing real servers: BF16 with FP4, and FP4 with hints off and on.

    .venv/bin/python benchmarks/bench_arms.py [--model DIR --policy DIR] [--rounds 4] [--rate 1]

Two front-ends with an engine each, the training-time version and the policy, are up at once. Blocks of one open-loop
schedule take turns on them; see docs/load-tests.md for what the intervals are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import figures

from trace_serve.policy.build import build_policy
from trace_serve.policy.sample import build_sample_model
from trace_serve.recipe import PRESETS
from trace_serve.server.process import ServerProcess

KEY = "bench-arms-key-0123456789"
START_TIMEOUT_S = 600.0
SHOWN = {"TTFT mean ms": "TTFT", "TPOT mean ms": "TPOT", "E2E mean ms": "end to end"}
"""Mean latencies."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load(host: str, out: Path, options: argparse.Namespace, *arm: str) -> dict[str, str]:
    """Ratios of the second arm over the first, by name.

    Raises:
        SystemExit: a run was invalid.
    """
    command = [sys.executable, "-m", "trace_serve", "load", host, *arm, "--rounds", str(options.rounds)]
    command += ["--arrivals", "poisson", "--rate", str(options.rate), "--duration", f"{options.seconds:g}s"]
    command += ["--warmup", "3s", "--max-tokens", str(options.tokens), "--max-lag", "5", "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "TRACE_SERVE_API_KEY": KEY}, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"the comparison is invalid, exit code {done.returncode}")
    ratios = json.loads((out / "comparison.json").read_text())["ratios"]
    return {
        SHOWN[each["name"]]: f"{each['ratio']:.2f} [{each['low']:.2f}, {each['high']:.2f}]"
        for each in ratios
        if each["name"] in SHOWN
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="BF16 model of the policy; without it the sample is built")
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=24)
    figures.add_option(parser)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trace-serve-bench-")))
        model = options.model or build_sample_model(scratch / "sample", progress=say)
        policies = {"bf16": scratch / "bf16", "fp4": options.policy or scratch / "fp4"}
        for name, preset in (("bf16", "bf16"), ("fp4", "default")):
            if not policies[name].exists():
                build_policy(model, policies[name], name=name, version="1", recipe=PRESETS[preset])
        servers = {}
        for name, policy in policies.items():
            say(f"starting {name}")
            server = ServerProcess(policy, mode="rollout", api_key=KEY, log_path=scratch / f"{name}.log")
            servers[name] = stack.enter_context(server)
            server.wait_ready(START_TIMEOUT_S)
        bf16, fp4 = servers["bf16"].url, servers["fp4"].url
        told = {
            f"FP4 over BF16 server, {options.rate:g} requests/s: {name}": value
            for name, value in load(bf16, scratch / "arms", options, "--against", fp4).items()
        }
        told |= {
            f"FP4 server with hints over without, {options.rate:g} requests/s: {name}": value
            for name, value in load(fp4, scratch / "hints", options, "--compare-hints").items()
        }
    for name, value in told.items():
        print(f"{name}: {value}")
    figures.write(options.figures, told)


if __name__ == "__main__":
    main()
