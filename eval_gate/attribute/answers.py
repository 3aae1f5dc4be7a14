"""Answers of one model under any recipe: from files of earlier runs where they are complete, else from an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import (
    ArmRecord,
    ErrorClass,
    ResultsLog,
    Role,
    SampleRecord,
    cache_key,
    read_results,
    write_results,
)
from eval_gate.arms.source import ArmSource
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool
from eval_gate.execute import Job, jobs, reuse, sample_arm, token_fields, tokenize_prompts
from eval_gate.pairing import ArmResults
from eval_gate.policy import GatePolicy
from eval_gate.queries import QuerySet
from trace_serve.recipe import Recipe


@dataclass(frozen=True)
class Recording:
    """What is asked for beside the text.

    Attributes:
        tokens: token ids, log-probabilities and the most likely token of each position.
        routes: routed experts of every token; four bytes an expert and layer, prompt included.
    """

    tokens: bool = True
    routes: bool = False

    def fields(self, api: str) -> dict[str, Any]:
        """Fields of a request body; those that are not OpenAI's are SGLang's."""
        chosen: dict[str, Any] = {}
        if self.tokens:
            chosen |= token_fields(api)
        if self.routes:
            chosen["return_routed_experts"] = True
        return chosen


@dataclass(frozen=True)
class Answered:
    """One recipe's answers; `recorded` says that no engine was started for them."""

    results: ArmResults
    recorded: bool
    complete: bool


class Answers:
    """Asks one model under changing recipes.

    Each recipe has one file in `directory`, named by a digest of (model, recipe, queries, sampling), to which
    every exchange is appended as soon as it is there, so that an interrupted run goes on where it was.

    Args:
        source: the training arm of the model's directory.
        queries: what is asked, as sampled.
    """

    def __init__(
        self,
        source: ArmSource,
        queries: QuerySet,
        policy: GatePolicy,
        directory: Path,
        *,
        recording: Recording,
        graders: GraderPool,
        budget: Budget,
        startup_timeout_s: float,
        on_sample: Callable[[SampleRecord], None],
    ) -> None:
        self._source = source
        self._queries = queries
        self._policy = policy
        self._directory = directory
        self._recording = recording
        self._graders = graders
        self._budget = budget
        self._startup_timeout_s = startup_timeout_s
        self._on_sample = on_sample

    def path(self, recipe: Recipe | None) -> Path:
        """File of a recipe's answers; None is BF16."""
        identity = {
            "model": self._source.evidence.artifact_digest,
            "recipe_id": None if recipe is None else recipe.recipe_id,
            "queries": self._queries.digest,
            "temperature": self._policy.temperature,
            "api": self._policy.api,
            "fields": self._recording.fields(self._policy.api),
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return self._directory / f"{digest[:32]}.jsonl"

    async def of(self, recipe: Recipe | None) -> Answered:
        """All answers under a recipe, or in BF16.

        Raises:
            EngineError: the engine did not start, or cannot be reached.
            ConfigError: it cannot serve the model under the recipe.
        """
        role = Role.TRAINING if recipe is None else Role.SERVING
        recipe_id = None if recipe is None else recipe.recipe_id
        source = replace(
            self._source,
            role=role,
            recipe=recipe,
            evidence=self._source.evidence.model_copy(update={"recipe_id": recipe_id}),
        )
        path = self.path(recipe)
        records = read_results(path) if path.exists() else []
        recorded = {one.key: one for one in records if isinstance(one, SampleRecord) and one.text is not None}
        evidence = next((one.evidence for one in reversed(records) if isinstance(one, ArmRecord)), None)
        wanted = self._jobs(role, source.evidence)
        if evidence is not None and all(job.key in recorded for job in wanted):
            samples = await reuse(wanted, role, recorded, self._graders)
            for sample in samples:
                self._on_sample(sample)
            return Answered(ArmResults(evidence, samples), recorded=True, complete=True)
        if records:
            # A line that a kill cut off must not become the start of the next one.
            write_results(path, records)
        samples = await reuse(wanted, role, recorded, self._graders)
        for sample in samples:
            self._on_sample(sample)
        return await self._ask(source, path, wanted, samples)

    async def _ask(self, source: ArmSource, path: Path, wanted: list[Job], samples: list[SampleRecord]) -> Answered:
        if self._budget.exhausted() is not None:
            return Answered(ArmResults(source.evidence, samples), recorded=True, complete=False)
        have = {sample.key for sample in samples}
        log_path = self._directory / f"engine-{path.stem[:8]}.log"
        async with source.open(self._startup_timeout_s, log_path) as arm:
            evidence = source.evidence.model_copy(update={"report": await arm.report()})
            prompts = await tokenize_prompts(arm, self._queries.queries, self._policy, source.endpoint.concurrency)
            with closing(ResultsLog(path)) as log:
                log.append(ArmRecord(role=source.role, evidence=evidence))
                samples = samples + await sample_arm(
                    arm,
                    source.role,
                    [job for job in wanted if job.key not in have],
                    log,
                    self._on_sample,
                    graders=self._graders,
                    budget=self._budget,
                    concurrency=source.endpoint.concurrency,
                    prompts=prompts,
                )
        complete = not any(one.failure is not None and one.failure.kind is ErrorClass.BUDGET for one in samples)
        return Answered(ArmResults(evidence, samples), recorded=False, complete=complete)

    def _jobs(self, role: Role, evidence: ArmEvidence) -> list[Job]:
        fields = self._recording.fields(self._policy.api)
        found = []
        for job in jobs(self._queries, self._policy, role, evidence):
            body = {**job.body, **fields}
            key = cache_key(
                artifact=str(evidence.artifact_digest),
                role=role,
                recipe_id=evidence.recipe_id,
                request=body,
                sample=job.sample,
            )
            found.append(replace(job, key=key, body=body))
        return found
