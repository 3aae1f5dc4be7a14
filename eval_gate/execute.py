"""Samples one arm: every query and repeat, each exchange graded and written down as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eval_gate.arms.base import Exchange
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.http import HttpArm as ChatArm
from eval_gate.arms.records import ErrorClass, Failure, ResultsLog, Role, SampleRecord, cache_key
from eval_gate.checkers import CheckerError, grade, program_of
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet


@dataclass(frozen=True)
class Job:
    """One sample to obtain."""

    query: Query
    sample: int
    key: str
    body: dict[str, Any]


def request_body(query: Query, policy: GatePolicy) -> dict[str, Any]:
    """The chat completion request of a query, without the model's name. No seed: servers do not keep to it."""
    return {
        "messages": [message.model_dump() for message in query.messages],
        "max_tokens": query.max_tokens,
        "temperature": policy.temperature,
        "top_p": 1.0,
        "stream": False,
    }


def jobs(queries: QuerySet, policy: GatePolicy, role: Role, evidence: ArmEvidence) -> Iterator[Job]:
    """All samples of an arm, repeats of the whole set one after the other."""
    artifact = evidence.artifact_digest or f"endpoint:{evidence.source}"
    recipe_id = evidence.recipe_id or (evidence.report.recipe_id if evidence.report else None)
    for sample in range(policy.repeats):
        for query in queries.queries:
            body = request_body(query, policy)
            key = cache_key(artifact=artifact, role=role, recipe_id=recipe_id, request=body, sample=sample)
            yield Job(query, sample, key, body)


def reuse(wanted: list[Job], role: Role, recorded: Mapping[str, SampleRecord]) -> list[SampleRecord]:
    """Recorded exchanges that answer these jobs, graded again under the queries' present checkers."""
    found = []
    for job in wanted:
        record = recorded.get(job.key)
        if record is None or record.text is None or record.role is not role:
            continue
        renamed = record.model_copy(update={"query_id": job.query.id, "sample": job.sample})
        found.append(graded(job.query, renamed))
    return found


async def sample_arm(
    arm: ChatArm,
    role: Role,
    wanted: list[Job],
    log: ResultsLog,
    on_sample: Callable[[SampleRecord], None],
) -> list[SampleRecord]:
    """Obtains every job's answer at the arm's concurrency. A failure becomes a record, not an exception."""

    async def one(job: Job) -> SampleRecord:
        body = {**job.body, "model": arm.model}
        record = graded(job.query, _record(job, role, body, await arm.complete(body)))
        log.append(record)
        on_sample(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(job)) for job in wanted]
    return [task.result() for task in tasks]


def graded(query: Query, record: SampleRecord) -> SampleRecord:
    """The record with its grade, or with the checker's fault as its failure."""
    if record.text is None:
        return record
    try:
        result = grade(program_of(query.checker), record.text)
    except CheckerError as exc:
        failure = Failure(kind=ErrorClass.CHECKER, message=str(exc))
        return record.model_copy(update={"passed": None, "extracted": None, "failure": failure})
    return record.model_copy(update={"passed": result.passed, "extracted": result.extracted, "failure": None})


def _record(job: Job, role: Role, body: dict[str, Any], exchange: Exchange) -> SampleRecord:
    return SampleRecord(
        key=job.key,
        query_id=job.query.id,
        role=role,
        sample=job.sample,
        request=body,
        response=exchange.response,
        text=exchange.text,
        finish_reason=exchange.finish_reason,
        prompt_tokens=exchange.prompt_tokens,
        completion_tokens=exchange.completion_tokens,
        latency_s=exchange.latency_s,
        attempts=exchange.attempts,
        failure=exchange.failure,
    )
