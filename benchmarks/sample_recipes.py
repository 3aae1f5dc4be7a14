"""What each knob of the recipe costs the sample model: pass rates on the real CPU engine, paired with BF16.

    .venv/bin/python benchmarks/sample_recipes.py --out runs/sample-recipes [--only NAME ...]

Answers are kept, so that an interrupted run goes on with the next recipe; the table is printed in Markdown at the end.
About two minutes a recipe on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.checkers import grade, program_of
from eval_gate.execute import request_body
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, load_queries
from eval_gate.stats.table import PairedTable
from eval_gate.stats.tango import tango_interval
from eval_gate.suites import path as suite_path
from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.policy.sample import build_sample_model
from trace_serve.recipe import PRESETS, Recipe

SUITE = "support-dev"
CONCURRENCY = 24
DEEP = tuple(range(15, 30))
LAST = (26, 27, 28, 29)
W4A16 = Recipe(experts="w4a16", kv="bf16")
W4A4 = Recipe(experts="w4a4", kv="bf16")
KV = Recipe(experts="bf16")

RECIPES: dict[str, Recipe] = {
    "BF16": PRESETS["bf16"],
    "W4A4, NVFP4 KV (`default`)": PRESETS["default"],
    "W4A4": W4A4,
    "W4A4, rotated 64": replace(W4A4, expert_rotation=64),
    "W4A4, rotated 16": replace(W4A4, expert_rotation=16),
    "W4A4, 4over6 for weights and activations": replace(W4A4, four_over_six="experts"),
    "W4A16": W4A16,
    "W4A16, rotated 64": replace(W4A16, expert_rotation=64),
    "W4A16, 4over6": replace(W4A16, four_over_six="weights"),
    "W4A16, rotated 64, 4over6": replace(W4A16, expert_rotation=64, four_over_six="weights"),
    "W4A16, 16x16 tiles": replace(W4A16, weight_tiles="16x16"),
    "W4A16, rotated 64, layers 15-29": replace(W4A16, expert_rotation=64, expert_layers=DEEP),
    "NVFP4 KV": KV,
    "NVFP4 KV, K rotated 64": replace(KV, k_rotation=64),
    "NVFP4 KV, K rotated 64, g = 2^-3": replace(KV, k_rotation=64, kv_global_scale_log2=-3),
    "NVFP4 KV, K rotated 64, layers 15-29": replace(KV, k_rotation=64, kv_layers=DEEP),
    "NVFP4 KV, K rotated 64, layers 26-29": replace(KV, k_rotation=64, kv_layers=LAST),
}


async def _answers(engine: EngineProcess, queries: list[Query]) -> list[str]:
    endpoint = Endpoint(url=engine.url, api_key=engine.api_key, model=engine.served_name, concurrency=CONCURRENCY)
    policy = GatePolicy()
    async with HttpArm(endpoint) as arm:

        async def one(query: Query) -> str:
            exchange = await arm.complete({**request_body(query, policy), "model": arm.model})
            if exchange.text is None:
                raise RuntimeError(f"{query.id}: {exchange.failure}")
            return exchange.text

        return await asyncio.gather(*(one(query) for query in queries))


def _run(model: Path, name: str, recipe: Recipe, queries: list[Query], log: Path) -> list[str]:
    print(f"{name}: starting", file=sys.stderr, flush=True)
    with EngineProcess(EngineConfig(model=model, recipe=recipe, log_path=log)) as engine:
        engine.wait_ready(600)
        return asyncio.run(_answers(engine, queries))


def _passes(query: Query, text: str) -> bool:
    return bool(grade(program_of(query.checker), text).passed)


def _row(name: str, passed: list[bool], texts: list[str], base: list[bool], base_texts: list[str]) -> str:
    table = PairedTable.from_pairs(zip(base, passed, strict=True))
    interval = tango_interval(table, 0.90)
    same = sum(a == b for a, b in zip(texts, base_texts, strict=True))
    gap = f"{100 * table.difference:+.1f} [{100 * interval.lower:+.1f}, {100 * interval.upper:+.1f}]"
    return f"| {name} | {sum(passed)} | {table.only_a} / {table.only_b} | {gap} | {same} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sample-recipes"))
    parser.add_argument(
        "--only", nargs="*", choices=list(RECIPES), metavar="NAME", help="some of the recipes; BF16 always runs"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    queries = list(load_queries(suite_path(SUITE)).queries)
    model = build_sample_model(arguments.out / "model")
    wanted = [name for name in RECIPES if name == "BF16" or not arguments.only or name in arguments.only]
    texts: dict[str, list[str]] = {}
    for name in wanted:
        kept = arguments.out / f"{RECIPES[name].recipe_id[7:23]}.json"
        if not kept.exists():
            kept.write_text(json.dumps(_run(model, name, RECIPES[name], queries, arguments.out / "engine.log")))
        texts[name] = json.loads(kept.read_text())
    passed = {
        name: [_passes(query, text) for query, text in zip(queries, answers, strict=True)]
        for name, answers in texts.items()
    }
    print(f"| recipe | passes of {len(queries)} | lost / gained | gap, points [90% Tango] | same text |")
    print("|---|---|---|---|---|")
    for name in wanted:
        print(_row(name, passed[name], texts[name], passed["BF16"], texts["BF16"]))


if __name__ == "__main__":
    main()
