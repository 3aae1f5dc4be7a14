"""Arms of one run while they are open: answers from records where they fit, from the arm itself where not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eval_gate.arms.base import Arm
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import ArmRecord, Judgement, PromptTokens, ResultsLog, Role, SampleRecord
from eval_gate.arms.source import ArmSource
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool
from eval_gate.execute import Job, jobs, reuse, sample_arm, tokenize_prompts
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern, Finding, check_arm, compare_arms, compare_prompt_tokens
from eval_gate.queries import Query, QuerySet
from eval_gate.tally import OnProgress, Tally


@dataclass(frozen=True)
class Recorded:
    """Records of this run before it was interrupted, and of other runs."""

    own: list[SampleRecord | ArmRecord]
    others: list[SampleRecord | ArmRecord]

    def samples(self, *, identified: bool) -> dict[str, SampleRecord]:
        """Answers by key. A URL may serve something else tomorrow, so an arm without a digest gets only its own."""
        records = [*self.others, *self.own] if identified else self.own
        return {r.key: r for r in records if isinstance(r, SampleRecord) and r.text is not None}

    def judgements(self, *arms: Sequence[SampleRecord] | None) -> dict[str, Judgement]:
        """What the judge said before, by key, also in arms that are nothing but records."""
        records = [record for records in (self.others, self.own, *(arm or () for arm in arms)) for record in records]
        samples = (r for r in records if isinstance(r, SampleRecord))
        return {r.judgement.key: r.judgement for r in samples if r.judgement is not None}


Sampler = Callable[[Sequence[Query]], Awaitable[list[SampleRecord]]]


class ArmSession:
    """One arm as long as it is open.

    Attributes:
        evidence: what the arm showed of itself.
        refused: the arm is not what it must be, so nothing is asked of it.
        prompts: by query id, the tokens of the rendered prompts, as far as the arm told them.
        findings: what the prompts showed against the other arm's.
        samples: what was obtained so far.
    """

    def __init__(
        self,
        evidence: ArmEvidence,
        sampler: Sampler | None,
        prompts: Mapping[str, PromptTokens] | None = None,
        findings: Sequence[Finding] = (),
    ) -> None:
        self.evidence = evidence
        self.refused = sampler is None
        self.prompts = dict(prompts or {})
        self.findings = tuple(findings)
        self.samples: list[SampleRecord] = []
        self._sampler = sampler

    async def sample(self, queries: Sequence[Query]) -> None:
        """Obtains every repeat of these queries and adds it to `samples`."""
        if self._sampler is not None:
            self.samples += await self._sampler(queries)


class Sessions:
    """Opens the arms of one run, and keeps what both share: records, the results file and the progress."""

    def __init__(
        self,
        queries: QuerySet,
        policy: GatePolicy,
        results: Path,
        recorded: Recorded,
        startup_timeout_s: float,
        on_progress: OnProgress,
        *,
        graders: GraderPool,
        budget: Budget,
        concurrency: int,
    ) -> None:
        self._graders = graders
        self._budget = budget
        self._concurrency = concurrency
        self._queries = queries
        self._policy = policy
        self._results = results
        self._recorded = recorded
        self._startup_timeout_s = startup_timeout_s
        self._arms = [r for r in [*recorded.others, *recorded.own] if isinstance(r, ArmRecord)]
        self._on_progress = on_progress
        self._tally = Tally(len(queries.queries) * policy.repeats, policy.alpha)

    @asynccontextmanager
    async def open(self, source: ArmSource, against: ArmSession | None = None) -> AsyncIterator[ArmSession]:
        """The arm, with its engine running while the context lasts unless records answer every query.

        With `against`, the session is refused when the arm proves to be something that may not be compared with it, or
        renders the queries to other tokens.
        """
        recorded = await self._from_records(source)
        if recorded is not None:
            yield recorded
            self._report(source.role, "done")
            return
        self._report(source.role, "starting")
        log_path = self._results.with_name(f"engine-{source.role}.log")
        async with source.open(self._startup_timeout_s, log_path) as arm:
            report = await arm.report()
            stated = report.policy_digest if report else None
            artifact = source.evidence.artifact_digest or stated
            evidence = source.evidence.model_copy(update={"report": report, "artifact_digest": artifact})
            if evidence.checkpoint is not None:
                checkpoint = evidence.checkpoint.model_copy(update={"served_root": arm.root})
                evidence = evidence.model_copy(update={"checkpoint": checkpoint})
            other = against.evidence if against else None
            if self.must_stop(check_arm(source.role, evidence), compare_arms(other, evidence) if other else []):
                yield ArmSession(evidence, None)
                return
            prompts = await tokenize_prompts(arm, self._queries.queries, self._policy, self._concurrency)
            findings = compare_prompt_tokens(against.prompts, prompts) if against else []
            if self.must_stop(findings):
                yield ArmSession(evidence, None, prompts, findings)
                return
            log = ResultsLog(self._results)
            try:
                log.append(ArmRecord(role=source.role, evidence=evidence, planned=len(self._queries.queries)))
                sampler = partial(self._sample, arm, source.role, evidence, log, prompts)
                yield ArmSession(evidence, sampler, prompts, findings)
            finally:
                log.close()
        self._report(source.role, "done")

    @property
    def exhausted(self) -> bool:
        """Is the budget spent, so that no arm need be opened any more?"""
        return self._budget.exhausted() is not None

    def must_stop(self, *findings: list[Finding]) -> bool:
        """Is there a finding that makes sampling pointless?"""
        allowed = {Concern.UNPROVEN} if self._policy.allow_unproven else set()
        return any(finding.concern not in allowed for group in findings for finding in group)

    def on_judged(self, record: SampleRecord) -> None:
        """Takes down a grade that its judge completed."""
        with closing(ResultsLog(self._results)) as log:
            log.append(record)
        self._note_and_report(record)

    async def _sample(
        self,
        arm: Arm,
        role: Role,
        evidence: ArmEvidence,
        log: ResultsLog,
        prompts: Mapping[str, PromptTokens],
        queries: Sequence[Query],
    ) -> list[SampleRecord]:
        wanted = self._jobs(queries, role, evidence)
        recorded = self._recorded.samples(identified=evidence.artifact_digest is not None)
        samples = await reuse(wanted, role, recorded, self._graders)
        have = {sample.key for sample in samples}
        written = self._recorded.samples(identified=False)
        for sample in samples:
            if sample.key not in written:
                log.append(sample)
            self._note(sample)
        self._report(role, "sampling")
        missing = [job for job in wanted if job.key not in have]
        return samples + await sample_arm(
            arm,
            role,
            missing,
            log,
            self._note_and_report,
            graders=self._graders,
            budget=self._budget,
            concurrency=self._concurrency,
            prompts=prompts,
        )

    async def _from_records(self, source: ArmSource) -> ArmSession | None:
        """The whole arm from recorded exchanges, without starting it; None unless every sample is there.

        A source that is nothing but a record is what it holds, complete or not.
        """
        if source.recorded is not None:
            wanted = self._jobs(self._queries.queries, source.role, source.evidence)
            answers = {record.key: record for record in source.recorded}
            found = await reuse(wanted, source.role, answers, self._graders)
            return ArmSession(source.evidence, partial(self._recall, found), _prompts(found))
        for record in reversed(self._arms):
            evidence = record.evidence
            known = source.evidence.artifact_digest
            if record.role is not source.role or known is None or evidence.artifact_digest != known:
                continue
            if evidence.recipe_id != source.evidence.recipe_id or check_arm(source.role, evidence):
                continue
            evidence = source.evidence.model_copy(update={"report": evidence.report})
            wanted = self._jobs(self._queries.queries, source.role, evidence)
            answers = self._recorded.samples(identified=True)
            if any(job.key not in answers for job in wanted):
                return None
            found = await reuse(wanted, source.role, answers, self._graders)
            return ArmSession(evidence, partial(self._recall, found), _prompts(found))
        return None

    async def _recall(self, found: list[SampleRecord], queries: Sequence[Query]) -> list[SampleRecord]:
        names = {query.id for query in queries}
        samples = [sample for sample in found if sample.query_id in names]
        for sample in samples:
            self._note(sample)
        return samples

    def _jobs(self, queries: Sequence[Query], role: Role, evidence: ArmEvidence) -> list[Job]:
        return list(jobs(replace(self._queries, queries=tuple(queries)), self._policy, role, evidence))

    def _note(self, record: SampleRecord) -> None:
        self._tally.note(record)

    def _note_and_report(self, record: SampleRecord) -> None:
        self._note(record)
        self._report(record.role, "sampling")

    def _report(self, role: Role, phase: str) -> None:
        self._on_progress(self._tally.progress(role, phase))


def _prompts(samples: Iterable[SampleRecord]) -> dict[str, PromptTokens]:
    return {sample.query_id: sample.prompt for sample in samples if sample.prompt is not None}
