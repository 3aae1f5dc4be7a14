"""Samples one arm: every query and repeat, each exchange graded and written down as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval_gate.arms.base import Arm, Exchange, unanswered
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import ErrorClass, Failure, PromptTokens, ResultsLog, Role, SampleRecord, cache_key
from eval_gate.budget import Budget
from eval_gate.checkers import CheckerError, Grade, GraderPool, Judged, program_of
from eval_gate.checkers.gathering import GatheredChecks
from eval_gate.judging import NOT_JUDGED
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query, QuerySet
from trace_serve.errors import ConfigError

MAX_TOKENIZED = 2000
"""Queries whose prompts are compared by token ids before anything is sampled. They are in seeded random order."""


@dataclass(frozen=True)
class Job:
    """One sample to obtain."""

    query: Query
    sample: int
    key: str
    body: dict[str, Any]


def request_body(query: Query, policy: GatePolicy) -> dict[str, Any]:
    """The request of a query, without the model's name. No seed: servers do not keep to it.

    Raises:
        ConfigError: a conversation cannot be sent to the completions route, which has no chat template.
    """
    if policy.api == "chat":
        prompt: dict[str, Any] = {"messages": [message.model_dump() for message in query.messages]}
    elif len(query.messages) == 1 and query.messages[0].role == "user":
        prompt = {"prompt": query.messages[0].content}
    else:
        raise ConfigError(
            f"query {query.id!r}: is a conversation, which --api completions cannot render; use --api chat", field="api"
        )
    return {
        **prompt,
        "max_tokens": query.max_tokens,
        "temperature": policy.temperature,
        "top_p": 1.0,
        "stream": False,
        **(token_fields(policy.api) if policy.record_tokens else {}),
    }


def token_fields(api: str) -> dict[str, Any]:
    """Fields of a request for the answer as tokens too: OpenAI's log-probabilities, SGLang's and vLLM's token ids."""
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if api == "chat" else {"logprobs": 1}
    return {**logprobs, "return_token_ids": True}


def jobs(queries: QuerySet, policy: GatePolicy, role: Role, evidence: ArmEvidence) -> Iterator[Job]:
    """All samples of an arm, repeats of the whole set one after the other."""
    artifact = evidence.artifact_digest or f"endpoint:{evidence.source}"
    if evidence.runtime is not None:
        artifact = f"{evidence.runtime}:{artifact}"
    recipe_id = evidence.recipe_id or (evidence.report.recipe_id if evidence.report else None)
    for sample in range(policy.repeats):
        for query in queries.queries:
            body = request_body(query, policy)
            key = cache_key(artifact=artifact, role=role, recipe_id=recipe_id, request=body, sample=sample)
            yield Job(query, sample, key, body)


async def reuse(
    wanted: list[Job], role: Role, recorded: Mapping[str, SampleRecord], graders: GraderPool
) -> list[SampleRecord]:
    """Recorded exchanges that answer these jobs, graded again under the queries' present checkers."""
    found = []
    for job in wanted:
        record = recorded.get(job.key)
        if record is None or record.text is None or record.role is not role:
            continue
        found.append((job.query, record.model_copy(update=_place(job))))
    checks = [(program_of(query.checker), record.text or "") for query, record in found]
    results = await graders.grade_many(checks)
    return [with_grade(query, record, result) for (query, record), result in zip(found, results, strict=True)]


async def tokenize_prompts(
    arm: Arm, queries: Sequence[Query], policy: GatePolicy, concurrency: int
) -> dict[str, PromptTokens]:
    """By query id, the tokens of at most `MAX_TOKENIZED` rendered prompts; none if the arm cannot tell."""
    slots = asyncio.Semaphore(concurrency)

    async def one(query: Query) -> PromptTokens | None:
        async with slots:
            ids = await arm.tokenize(request_body(query, policy))
        return None if ids is None else PromptTokens.of(ids)

    first, *others = queries[:MAX_TOKENIZED]
    found = {first.id: await one(first)}
    if found[first.id] is None:
        return {}
    found |= dict(zip((q.id for q in others), await asyncio.gather(*map(one, others)), strict=True))
    return {query_id: prompt for query_id, prompt in found.items() if prompt is not None}


async def sample_arm(
    arm: Arm,
    role: Role,
    wanted: list[Job],
    log: ResultsLog,
    on_sample: Callable[[SampleRecord], None],
    *,
    graders: GraderPool,
    budget: Budget,
    concurrency: int,
    prompts: Mapping[str, PromptTokens],
) -> list[SampleRecord]:
    """Obtains every job's answer, `concurrency` requests at a time. A failure becomes a record, not an exception.

    What the budget leaves out is not written down, so that a resumed run asks for it.

    Args:
        prompts: by query id, the tokens of its prompt, to be kept with each sample.
    """

    slots = asyncio.Semaphore(concurrency)
    to_come = len(wanted)

    async def one(job: Job) -> SampleRecord:
        nonlocal to_come
        body = {**job.body, "model": arm.model}
        async with slots:
            spent = budget.exhausted()
            if spent is not None:
                return _record(job, role, body, unanswered(Failure(kind=ErrorClass.BUDGET, message=spent)))
            exchange = await arm.complete(body)
        to_come -= 1
        budget.spend(exchange.prompt_tokens, exchange.completion_tokens, job.query.max_tokens)
        answered = _record(job, role, body, exchange, prompts.get(job.query.id))
        record = await _graded(job.query, answered, checks, last=to_come == 0)
        log.append(record)
        on_sample(record)
        return record

    async with GatheredChecks(graders) as checks, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(job)) for job in wanted]
    return [task.result() for task in tasks]


async def _graded(query: Query, record: SampleRecord, checks: GatheredChecks, *, last: bool) -> SampleRecord:
    if record.text is None:
        return record
    return with_grade(query, record, await checks.grade(program_of(query.checker), record.text, last=last))


def with_grade(query: Query, record: SampleRecord, result: Grade | CheckerError) -> SampleRecord:
    """The record with what its checker found; one that still needs its judge has no grade yet."""
    if isinstance(result, CheckerError):
        failure = Failure(kind=ErrorClass.CHECKER, message=str(result))
        return record.model_copy(update={"passed": None, "extracted": None, "failure": failure})
    if result.passed and isinstance(query.checker, Judged):
        failure = Failure(kind=ErrorClass.JUDGE, message=NOT_JUDGED)
        return record.model_copy(update={"passed": None, "extracted": result.extracted, "failure": failure})
    return record.model_copy(update={"passed": result.passed, "extracted": result.extracted, "failure": None})


def _place(job: Job) -> dict[str, Any]:
    query = job.query
    return {
        "query_id": query.id,
        "sample": job.sample,
        "suite": query.suite,
        "kind": query.kind,
        "cluster": query.cluster,
        "checker": program_of(query.checker).type,
    }


def _record(
    job: Job, role: Role, body: dict[str, Any], exchange: Exchange, prompt: PromptTokens | None = None
) -> SampleRecord:
    return SampleRecord(
        key=job.key,
        role=role,
        **_place(job),
        request=body,
        response=exchange.response,
        text=exchange.text,
        finish_reason=exchange.finish_reason,
        prompt_tokens=exchange.prompt_tokens,
        completion_tokens=exchange.completion_tokens,
        latency_s=exchange.latency_s,
        attempts=exchange.attempts,
        prompt=prompt,
        failure=exchange.failure,
    )
