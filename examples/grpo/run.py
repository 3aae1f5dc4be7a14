"""GRPO with FP4 rollouts from the real engine: vanilla QAT against TRACE, on a 135M policy and two CPU cores.

    python examples/grpo/run.py --out runs/grpo

Writes ARM.jsonl and index.html below --out. The same command again runs the arms that are not complete.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from learner import ARMS, Learner
from loop import Arm, Options, is_complete, read_metrics
from report import page
from rollouts import CONCURRENCY, HINTS, Sampler
from task import held_out_problems, training_problems

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import EXIT_INTERRUPTED, ConfigError, TraceServeError
from trace_serve.policy.build import build_policy
from trace_serve.policy.manifest import Policy, load_policy
from trace_serve.policy.sample import build_sample_model
from trace_serve.recipe import PRESETS

START_TIMEOUT_S = 900.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; options of the loop have its own defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="directory for everything (%(default)s)")
    parser.add_argument(
        "--policy", type=Path, help="policy directory, BF16 on disk; default: the sample, built below --out"
    )
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=["qat", "trace"], help="in this order")
    for each in fields(Options):
        kind = type(each.default)
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default, help="%(default)s")
    return parser.parse_args(words)


def sample_policy(out: Path) -> Policy:
    """The sample model as a policy of the default recipe; built once."""
    model = build_sample_model(out / "model", progress=print)
    return build_policy(model, out / "policy", name="sample", version="1", recipe=PRESETS["default"])


def check_same_options(out: Path, options: Options) -> None:
    """Raises ConfigError where a run with other options is there."""
    path, mine = out / "options.json", asdict(options)
    if not path.exists():
        path.write_text(json.dumps(mine, indent=2) + "\n", encoding="utf-8")
    elif (theirs := json.loads(path.read_text("utf-8"))) != mine:
        other = next(name for name in mine if theirs.get(name) != mine[name])
        raise ConfigError(
            f"--{other.replace('_', '-')}: got {mine[other]}, but {path} has {theirs.get(other)}; choose another --out",
            field=other,
        )


def run(given: argparse.Namespace) -> None:
    """Every arm that is not complete yet, on one engine, and the page."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # Threads that share cores with the engine wait for one another at every product.
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    options = Options(**{each.name: getattr(given, each.name) for each in fields(Options)})
    given.out.mkdir(parents=True, exist_ok=True)
    check_same_options(given.out, options)
    policy = load_policy(given.policy) if given.policy else sample_policy(given.out)
    paths = {arm: given.out / f"{arm}.jsonl" for arm in given.arms}
    config = EngineConfig(
        model=policy.path,
        recipe=policy.recipe,
        log_path=given.out / "engine.log",
        max_total_tokens=8192,
        max_running_requests=CONCURRENCY,
        hints=HINTS,
        partial_refit=True,
    )
    if missing := [arm for arm in given.arms if not is_complete(paths[arm])]:
        engine = EngineProcess(config)
        print("starting the FP4 engine", flush=True)
        try:
            engine.start()
            engine.wait_ready(START_TIMEOUT_S)
            sampler = Sampler(engine, AutoTokenizer.from_pretrained(policy.path), options.tokens)
            for arm in missing:
                run_arm(arm, paths[arm], policy, sampler, options)
                # Modules and the plug refer to each other, and two trainers would hold twice the memory.
                gc.collect()
        finally:
            engine.stop()
    found = {arm: read_metrics(path) for arm, path in paths.items()}
    target = given.out / "index.html"
    target.write_text(page(found, asdict(options), f"{policy.name}@{policy.version}"), encoding="utf-8")
    print(f"{target} has the curves")


def run_arm(arm: str, path: Path, policy: Policy, sampler: Sampler, options: Options) -> None:
    """One arm from its first step to its last."""
    learner = Learner(policy.path, policy.recipe, arm, layers=options.layers, learning_rate=options.learning_rate)
    problems = partial(training_problems, options.seed, options.prompts)
    loop = Arm(path, learner, sampler, options, problems, held_out_problems())
    loop.run(partial(show, arm, options.steps))


def show(arm: str, steps: int, row: dict[str, Any]) -> None:
    """One line a step."""
    shown = {
        "abs_delta": "|dlogp| {:.3f}",
        "k3": "k3 {:.4f}",
        "ratio_max": "largest ratio {:.2f}",
        "clipped": "clipped {:.1%}",
    }
    shown |= {key: key.replace("_", " ") + " {:.3f}" for key in ("held_out_before", "held_out_after")}
    words = [text.format(row[key]) for key, text in shown.items() if key in row]
    seconds = sum(row["seconds"].values())
    words = [f"{arm} {row['step'] + 1}/{steps}", f"reward {row['reward']:.3f}", *words, f"{seconds:.0f} s"]
    print("  ".join(words), flush=True)


def main() -> int:
    try:
        run(arguments())
    except TraceServeError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command runs the arms that are not complete", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored; the engine's process group is its own, and `run` stops it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
