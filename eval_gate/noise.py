"""How far an arm is from itself: the same queries twice through one arm, at the run's own concurrency."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from eval_gate.arms.engine import running
from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role, SampleRecord, read_results, write_atomic
from eval_gate.arms.source import resolve
from eval_gate.run import ArmConfig, GateConfig, run_gate_async
from eval_gate.stats.newcombe import wilson_interval
from eval_gate.tally import OnProgress
from eval_gate.verdict import Score, Verdict
from trace_serve.errors import ConfigError


class NoiseFloor(BaseModel):
    """What differs between two passes of one arm. A gap of this size says nothing about a policy.

    Attributes:
        queries: asked twice, of which `scored` have every grade.
        texts_differ: queries of which any answer differs between the passes.
        grades_differ: queries of which the pass rate differs.
        discordance: share of scored queries whose pass rate differs, with its 90% interval.
        gap: first pass less second pass.
        lower: bounds of the gap as `run` computes them.
        smallest_margin: a margin has to exceed this for the arm to pass against itself with these queries.
        unscored: samples without a grade, both passes.
        differing: ids of the queries whose pass rate differs.
    """

    model_config = ConfigDict(frozen=True)

    source: str
    queries: int
    scored: int
    repeats: int
    temperature: float
    concurrency: int
    texts_differ: int
    grades_differ: int
    discordance: Score
    discordance_low: Score
    discordance_high: Score
    gap: Score
    lower: Score
    upper: Score
    smallest_margin: Score
    unscored: int
    differing: tuple[str, ...]


def measure_noise(config: GateConfig, role: Role, on_progress: OnProgress | None = None) -> NoiseFloor:
    """Runs one arm twice, and leaves `results.jsonl` and `noise.json` in `config.out`.

    Args:
        config: of which `training` names the arm; `serving` is ignored.
        role: how a policy directory is served: `serving` under its recipe, `training` in BF16.

    Raises:
        ConfigError, EngineError: as of `run_gate_async`.
    """
    return asyncio.run(_measure(config, role, on_progress))


async def _measure(config: GateConfig, role: Role, on_progress: OnProgress | None) -> NoiseFloor:
    arm = config.training
    endpoint = Endpoint(
        url=arm.spec, api_key=arm.api_key, model=arm.model, timeout_s=config.timeout_s, concurrency=config.concurrency
    )
    source = await asyncio.to_thread(resolve, role, arm.spec, endpoint)
    if source.model is not None or source.recorded is not None:
        raise ConfigError(
            f"--arm {arm.spec!r}: expected a URL or a directory that an engine is started for", field="arm"
        )
    # An arm against itself proves nothing about what it runs, and need not.
    policy = config.policy.model_copy(update={"allow_unproven": True, "looks": 1})
    async with AsyncExitStack() as stack:
        if source.directory is not None:
            config.out.mkdir(parents=True, exist_ok=True)
            endpoint = await stack.enter_async_context(
                running(
                    source.directory,
                    source.recipe,
                    source.evidence.artifact_digest,
                    endpoint,
                    config.startup_timeout_s,
                    config.out / "engine.log",
                )
            )
        same = ArmConfig(endpoint.url, endpoint.api_key, endpoint.model)
        result = await run_gate_async(
            replace(config, training=same, serving=same, policy=policy, key=None), on_progress
        )
    found = _noise(config, arm.spec, result.verdict)
    # A verdict on an arm against itself must not be taken for one on a release.
    for path in (
        result.paths.verdict,
        result.paths.html,
        result.paths.markdown,
        result.paths.junit,
        result.paths.gate_policy,
    ):
        path.unlink(missing_ok=True)
    write_atomic(config.out / "noise.json", (found.model_dump_json(indent=2) + "\n").encode())
    return found


def _noise(config: GateConfig, source: str, verdict: Verdict) -> NoiseFloor:
    texts: dict[tuple[str, int], dict[Role, str | None]] = defaultdict(dict)
    rates: dict[str, dict[Role, int]] = defaultdict(lambda: dict.fromkeys(Role, 0))
    broken = set()
    for record in read_results(config.out / "results.jsonl"):
        if isinstance(record, SampleRecord):
            texts[record.query_id, record.sample][record.role] = record.text
            rates[record.query_id][record.role] += record.passed is True
            if record.passed is None:
                broken.add(record.query_id)
    differing = [
        name for name, rate in rates.items() if name not in broken and rate[Role.TRAINING] != rate[Role.SERVING]
    ]
    overall = verdict.overall
    share = wilson_interval(len(differing), overall.scored, 0.90)
    return NoiseFloor(
        source=source,
        queries=overall.n,
        scored=overall.scored,
        repeats=config.policy.repeats,
        temperature=config.policy.temperature,
        concurrency=config.concurrency,
        texts_differ=len({name for (name, _), pair in texts.items() if len(set(pair.values())) > 1}),
        grades_differ=len(differing),
        discordance=len(differing) / overall.scored if overall.scored else None,
        discordance_low=share.lower,
        discordance_high=share.upper,
        gap=overall.gap,
        lower=overall.lower,
        upper=overall.upper,
        smallest_margin=overall.upper,
        unscored=sum(verdict.training.unscored.values()) + sum(verdict.serving.unscored.values()),
        differing=tuple(differing),
    )
