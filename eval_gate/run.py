"""One gate run from start to signed verdict; what the command line and other programs call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.http import ChatArm, Endpoint
from eval_gate.arms.records import (
    ArmRecord,
    ResultsLog,
    Role,
    SampleRecord,
    read_results,
    write_atomic,
    write_results,
)
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.decide import ArmResults, decide
from eval_gate.execute import Job, jobs, reuse, sample_arm
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Concern, Finding, check_arm, compare_arms
from eval_gate.queries import QuerySet, load_queries
from eval_gate.report.html import render_html
from eval_gate.report.markdown import render_markdown
from eval_gate.signing import load_private_key, sign_verdict
from eval_gate.suites import NAMES
from eval_gate.suites import path as suite_path
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class ArmConfig:
    """One arm as the user names it: a URL or a directory, and how to talk to it."""

    spec: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None


@dataclass(frozen=True)
class GateConfig:
    """One run.

    Attributes:
        training: version A, as trained.
        serving: version B, as served.
        queries: a shipped suite's name or the path of a JSON-lines file.
        out: directory for results, verdict and reports; made when missing.
        policy: the settings the release is judged under.
        key: private key that signs the verdict; None leaves it unsigned.
        concurrency: requests in flight at one arm.
        timeout_s: limit of one attempt at one answer.
        startup_timeout_s: limit for an engine that the gate starts itself.
        resume: continue the results that an interrupted run left in `out`.
        reuse: results files of other runs whose exchanges may be taken over; the key of each (artifact digest, role,
            recipe, request, repeat) decides, never a served name.
    """

    training: ArmConfig
    serving: ArmConfig
    queries: str
    out: Path
    policy: GatePolicy = field(default_factory=GatePolicy)
    key: Path | None = None
    concurrency: int = 8
    timeout_s: float = 120.0
    startup_timeout_s: float = 600.0
    resume: bool = False
    reuse: tuple[Path, ...] = ()


@dataclass(frozen=True)
class GatePaths:
    """Files of a run; `envelope` is None without a key."""

    results: Path
    verdict: Path
    envelope: Path | None
    html: Path
    markdown: Path


@dataclass(frozen=True)
class GateResult:
    """What a run gives back."""

    verdict: Verdict
    paths: GatePaths


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        role: the arm at work.
        phase: `starting` its engine, `sampling`, or `done`.
        done: samples that are there, of `total`.
        passed: right answers among them.
        failed: samples without a grade.
        gap: training less serving pass rate over the pairs that are complete; None before the first.
    """

    role: Role
    phase: str
    done: int
    total: int
    passed: int
    failed: int
    gap: float | None


OnProgress = Callable[[Progress], None]


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
    if config.key is not None:
        load_private_key(config.key)
    queries = _queries(config)
    endpoint = Endpoint(url="", timeout_s=config.timeout_s, concurrency=config.concurrency)
    sources = [
        await asyncio.to_thread(
            resolve, role, arm.spec, replace(endpoint, url=arm.spec, api_key=arm.api_key, model=arm.model)
        )
        for role, arm in ((Role.TRAINING, config.training), (Role.SERVING, config.serving))
    ]
    paths = _prepare(config)
    recorded = _recorded(config, paths.results)
    run = _Run(config, queries, paths, recorded, on_progress or (lambda progress: None))
    training = await run.gather(sources[0])
    stop = run.must_stop(
        compare_arms(training.evidence, sources[1].evidence), check_arm(Role.TRAINING, training.evidence)
    )
    serving = ArmResults(sources[1].evidence, []) if stop else await run.gather(sources[1], against=training.evidence)
    return conclude(config, queries, training, serving, paths)


def conclude(
    config: GateConfig, queries: QuerySet, training: ArmResults, serving: ArmResults, paths: GatePaths
) -> GateResult:
    """Writes the final results, decides, and writes verdict, envelope and reports."""
    records: Iterable[SampleRecord | ArmRecord] = [
        ArmRecord(role=Role.TRAINING, evidence=training.evidence),
        *training.samples,
        ArmRecord(role=Role.SERVING, evidence=serving.evidence),
        *serving.samples,
    ]
    digest = write_results(paths.results, records)
    verdict = decide(config.policy, queries, training, serving, results_digest=digest)
    write_atomic(paths.verdict, (verdict.model_dump_json(indent=2) + "\n").encode())
    write_atomic(paths.html, render_html(verdict).encode())
    write_atomic(paths.markdown, render_markdown(verdict).encode())
    if config.key is not None and paths.envelope is not None:
        sign_verdict(verdict, config.key, paths.envelope)
    return GateResult(verdict, paths)


@dataclass(frozen=True)
class _Recorded:
    """Records of this run before it was interrupted, and of other runs."""

    own: list[SampleRecord | ArmRecord]
    others: list[SampleRecord | ArmRecord]

    def samples(self, *, identified: bool) -> dict[str, SampleRecord]:
        """Answers by key. A URL may serve something else tomorrow, so an arm without a digest gets only its own."""
        records = [*self.others, *self.own] if identified else self.own
        return {r.key: r for r in records if isinstance(r, SampleRecord) and r.text is not None}


class _Run:
    """State of one run that both arms share."""

    def __init__(
        self,
        config: GateConfig,
        queries: QuerySet,
        paths: GatePaths,
        recorded: _Recorded,
        on_progress: OnProgress,
    ) -> None:
        self._config = config
        self._queries = queries
        self._paths = paths
        self._recorded = recorded
        self._arms = [r for r in [*recorded.others, *recorded.own] if isinstance(r, ArmRecord)]
        self._on_progress = on_progress
        self._grades: dict[tuple[Role, str, int], bool | None] = {}

    async def gather(self, source: ArmSource, against: ArmEvidence | None = None) -> ArmResults:
        """All samples of one arm: recorded ones where their key fits, the rest from the arm itself.

        With `against`, nothing is sampled when the arm proves to be something that may not be compared with it.
        """
        complete = self._from_records(source)
        if complete is not None:
            return complete
        self._report(source.role, "starting")
        log_path = self._config.out / f"engine-{source.role}.log"
        async with (
            source.open(self._config.startup_timeout_s, log_path) as endpoint,
            ChatArm(endpoint) as arm,
        ):
            report = await arm.report()
            stated = report.policy_digest if report else None
            artifact = source.evidence.artifact_digest or stated
            evidence = source.evidence.model_copy(update={"report": report, "artifact_digest": artifact})
            if self.must_stop(check_arm(source.role, evidence), compare_arms(against, evidence) if against else []):
                return ArmResults(evidence, [])
            wanted = self._jobs(source.role, evidence)
            samples = reuse(wanted, source.role, self._recorded.samples(identified=artifact is not None))
            have = {sample.key for sample in samples}
            written = self._recorded.samples(identified=False)
            log = ResultsLog(self._paths.results)
            try:
                log.append(ArmRecord(role=source.role, evidence=evidence))
                for sample in samples:
                    if sample.key not in written:
                        log.append(sample)
                    self._note(sample)
                self._report(source.role, "sampling")
                missing = [job for job in wanted if job.key not in have]
                samples += await sample_arm(arm, source.role, missing, log, self._note_and_report)
            finally:
                log.close()
        self._report(source.role, "done")
        return ArmResults(evidence, samples)

    def must_stop(self, *findings: list[Finding]) -> bool:
        """Is there a finding that makes sampling pointless?"""
        allowed = {Concern.UNPROVEN} if self._config.policy.allow_unproven else set()
        return any(finding.concern not in allowed for group in findings for finding in group)

    def _from_records(self, source: ArmSource) -> ArmResults | None:
        """The whole arm from recorded exchanges, without starting it; None unless every sample is there."""
        for record in reversed(self._arms):
            evidence = record.evidence
            known = source.evidence.artifact_digest
            if record.role is not source.role or known is None or evidence.artifact_digest != known:
                continue
            if evidence.recipe_id != source.evidence.recipe_id or check_arm(source.role, evidence):
                continue
            evidence = source.evidence.model_copy(update={"report": evidence.report})
            wanted = self._jobs(source.role, evidence)
            samples = reuse(wanted, source.role, self._recorded.samples(identified=True))
            if len(samples) < len(wanted):
                return None
            for sample in samples:
                self._note(sample)
            self._report(source.role, "done")
            return ArmResults(evidence, samples)
        return None

    def _jobs(self, role: Role, evidence: ArmEvidence) -> list[Job]:
        return list(jobs(self._queries, self._config.policy, role, evidence))

    def _note(self, record: SampleRecord) -> None:
        self._grades[record.role, record.query_id, record.sample] = record.passed

    def _note_and_report(self, record: SampleRecord) -> None:
        self._note(record)
        self._report(record.role, "sampling")

    def _report(self, role: Role, phase: str) -> None:
        mine = [grade for (owner, _, _), grade in self._grades.items() if owner is role]
        differences = [
            int(grade) - int(other)
            for (owner, query, sample), grade in self._grades.items()
            if owner is Role.TRAINING and grade is not None
            if (other := self._grades.get((Role.SERVING, query, sample))) is not None
        ]
        self._on_progress(
            Progress(
                role=role,
                phase=phase,
                done=len(mine),
                total=len(self._queries.queries) * self._config.policy.repeats,
                passed=sum(grade is True for grade in mine),
                failed=sum(grade is None for grade in mine),
                gap=sum(differences) / len(differences) if differences else None,
            )
        )


def _queries(config: GateConfig) -> QuerySet:
    path = suite_path(config.queries) if config.queries in NAMES else Path(config.queries)
    return load_queries(path).sample(config.policy.max_queries, config.policy.sample_seed)


def _prepare(config: GateConfig) -> GatePaths:
    out = config.out
    paths = GatePaths(
        results=out / "results.jsonl",
        verdict=out / "verdict.json",
        envelope=out / "verdict.dsse.json" if config.key is not None else None,
        html=out / "report.html",
        markdown=out / "summary.md",
    )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: exists and is not a directory", field="out")
    if paths.results.exists() and not config.resume:
        raise ConfigError(
            f"--out {out}: holds results of an earlier run; add --resume to continue it, or choose another directory",
            field="out",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A verdict of an earlier run must not be taken for this one's while it runs or after it is interrupted.
        for path in (paths.verdict, out / "verdict.dsse.json", paths.html, paths.markdown):
            path.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {out}: cannot be written: {exc.strerror}", field="out") from exc
    return paths


def _recorded(config: GateConfig, results: Path) -> _Recorded:
    """Reads earlier records, and cuts the own results file back to its complete lines so that it can be continued."""
    others = [record for path in config.reuse for record in read_results(path)]
    own: list[SampleRecord | ArmRecord] = []
    if config.resume and results.exists():
        own = read_results(results)
        write_results(results, own)
    return _Recorded(own, others)
