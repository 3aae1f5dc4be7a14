"""Samples both arms, look by look, until the results decide."""

from __future__ import annotations

from contextlib import AsyncExitStack

from eval_gate.arms.records import Role
from eval_gate.arms.source import ArmSource
from eval_gate.judging import Judging
from eval_gate.looks import schedule
from eval_gate.pairing import ArmResults
from eval_gate.policy import GatePolicy
from eval_gate.preflight import check_arm, compare_arms
from eval_gate.queries import QuerySet
from eval_gate.session import Sessions


async def gather(
    policy: GatePolicy,
    queries: QuerySet,
    training: ArmSource,
    serving: ArmSource,
    sessions: Sessions,
    judging: Judging,
) -> tuple[ArmResults, ArmResults, int | None]:
    """Samples both arms, look by look, until the results decide; also gives the number of looks taken (None = all)."""
    plan = schedule(queries.queries, policy.looks)
    # Two models of ours never share the machine; then the training arm is complete before the serving arm starts.
    ours = [source.directory is not None or source.model is not None for source in (training, serving)]
    together = policy.looks > 1 and not all(ours)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(sessions.open(training))
        if not together:
            await one.sample([query for part in plan for query in part])
            await stack.aclose()
        if sessions.exhausted or sessions.must_stop(
            compare_arms(one.evidence, serving.evidence), check_arm(Role.TRAINING, one.evidence)
        ):
            return ArmResults(one.evidence, one.samples), ArmResults(serving.evidence, []), None
        two = await stack.enter_async_context(sessions.open(serving, against=one))
        for looked, part in enumerate(plan, start=1):
            if together and not two.refused:
                await one.sample(part)
            await two.sample(part)
            await judging.settle(queries.queries, (one.samples, two.samples), sessions.on_judged)
            arms = ArmResults(one.evidence, one.samples), ArmResults(two.evidence, two.samples, two.findings)
            if two.refused or (looked < len(plan) and _decided(policy, queries, arms, looked)):
                break
    return *arms, looked


def _decided(policy: GatePolicy, queries: QuerySet, arms: tuple[ArmResults, ArmResults], looked: int) -> bool:
    # Not at the top: numpy would keep the first request waiting, and see `run.run_gate_async`.
    from eval_gate.decide import judge

    return judge(policy, queries, *arms, looked=looked).final
