"""One gate run from start to signed verdict; what the command line and other programs call."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool
from eval_gate.config import ArmConfig, GateConfig
from eval_gate.gather import gather
from eval_gate.judging import Judging
from eval_gate.output import GatePaths, GateResult, claim, recorded_before
from eval_gate.prepare import Plan, prepare
from eval_gate.session import Sessions
from eval_gate.suites.named import stored
from eval_gate.tally import OnProgress

__all__ = ["ArmConfig", "GateConfig", "GatePaths", "GateResult", "Plan", "prepare", "run_gate", "run_gate_async"]


def run_gate(config: GateConfig, on_progress: OnProgress | None = None) -> GateResult:
    """Runs the gate in this thread, with its own event loop. See `run_gate_async`."""
    return asyncio.run(run_gate_async(config, on_progress))


async def run_gate_async(config: GateConfig, on_progress: OnProgress | None = None) -> GateResult:
    """Samples both arms, decides, writes and signs.

    All input is checked before anything is started or written. Arms run one after the other, so that two engines
    never share the machine.

    Raises:
        ConfigError: a flag, file or directory cannot be used.
        EngineError: an arm could not be started or reached at all.
        asyncio.CancelledError, KeyboardInterrupt: interrupted; results stay in `out`, no verdict is written.
    """
    plan = await asyncio.to_thread(prepare, config)
    paths = claim(plan.config)
    stored(plan.queries, config.out)
    # Statistics, reports and signing take longer to load than a short run may add; the first answers take longer still.
    ahead = asyncio.create_task(asyncio.to_thread(importlib.import_module, "eval_gate.conclude"))
    async with GraderPool(config.graders) as graders, _judge(plan.config) as judge_arm:
        recorded = recorded_before(config, paths.results)
        judging = Judging(
            judge_arm,
            seed=plan.config.policy.sample_seed,
            concurrency=config.concurrency,
            known=recorded.judgements(plan.training.recorded, plan.serving.recorded),
        )
        sessions = Sessions(
            plan.queries,
            plan.config.policy,
            paths.results,
            recorded,
            config.startup_timeout_s,
            on_progress or (lambda progress: None),
            graders=graders,
            budget=Budget(config.max_tokens, config.max_wall_s),
            concurrency=config.concurrency,
        )
        training, serving, looked = await gather(
            plan.config.policy, plan.queries, plan.training, plan.serving, sessions, judging
        )
    await ahead
    from eval_gate.conclude import conclude

    return conclude(plan.config, plan.queries, training, serving, paths, looked=looked)


@asynccontextmanager
async def _judge(config: GateConfig) -> AsyncIterator[HttpArm | None]:
    if config.judge is None:
        yield None
        return
    endpoint = Endpoint(
        url=config.judge.spec,
        api_key=config.judge.api_key,
        model=config.policy.judge,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
    )
    async with HttpArm(endpoint) as arm:
        yield arm
