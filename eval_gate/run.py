"""One gate run from start to signed verdict; what the command line and other programs call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.arms.records import (
    ArmRecord,
    Role,
    SampleRecord,
    read_results,
    write_results,
)
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool, Permissions, PoolLimits, check_allowed
from eval_gate.decide import ArmResults, decide, judge
from eval_gate.execute import request_body
from eval_gate.judging import Judging
from eval_gate.looks import schedule
from eval_gate.policy import GatePolicy
from eval_gate.preflight import check_arm, compare_arms
from eval_gate.queries import QuerySet
from eval_gate.redaction import load_redactor, redact
from eval_gate.report.write import ReportPaths, write_reports
from eval_gate.session import Recorded, Sessions
from eval_gate.signing import load_private_key, sign_verdict
from eval_gate.suites.named import open_all, stored
from eval_gate.tally import OnProgress
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class ArmConfig:
    """One arm as the user names it, and how to talk to it; see `arms.source.resolve`."""

    spec: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True)
class GateConfig:
    """One run.

    Attributes:
        training: version A, as trained.
        serving: version B, as served.
        queries: a suite's name or the path of a query file (see `suites.named`), or several of them.
        out: directory for results, verdict and reports; made when missing.
        policy: the settings the release is judged under.
        key: private key that signs the verdict; None leaves it unsigned.
        concurrency: requests in flight at one arm.
        timeout_s: limit of one attempt at one answer.
        startup_timeout_s: limit for an engine that the gate starts itself.
        resume: continue the results that an interrupted run left in `out`.
        permissions: what the query file may make this machine do.
        graders: limits of the processes that checkers run in.
        judge: the model behind checkers with a judge; its served name is the policy's.
        redact: what takes personal data out of the queries, see `redaction.load_redactor`.
        max_tokens: prompt and answer tokens of the whole run after which nothing more is asked.
        max_wall_s: seconds after which nothing more is asked.
        reuse: results files of other runs whose exchanges may be taken over; the key of each (artifact digest, role,
            recipe, request, repeat) decides, never a served name.
    """

    training: ArmConfig
    serving: ArmConfig
    queries: str | tuple[str, ...]
    out: Path
    policy: GatePolicy = field(default_factory=GatePolicy)
    key: Path | None = None
    concurrency: int = 8
    timeout_s: float = 120.0
    startup_timeout_s: float = 600.0
    resume: bool = False
    reuse: tuple[Path, ...] = ()
    permissions: Permissions = field(default_factory=Permissions)
    graders: PoolLimits = field(default_factory=PoolLimits)
    judge: ArmConfig | None = None
    redact: str | None = None
    max_tokens: int | None = None
    max_wall_s: float | None = None


@dataclass(frozen=True)
class GatePaths:
    """Files of a run; `envelope` is None without a key."""

    results: Path
    verdict: Path
    envelope: Path | None
    html: Path
    markdown: Path
    junit: Path


@dataclass(frozen=True)
class GateResult:
    """What a run gives back."""

    verdict: Verdict
    paths: GatePaths


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
    paths = _prepare(plan.config)
    stored(plan.queries, config.out)
    async with GraderPool(config.graders) as graders, _judge(plan.config) as judge_arm:
        recorded = _recorded(config, paths.results)
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
        training, serving, looked = await _gather(
            plan.config.policy, plan.queries, plan.training, plan.serving, sessions, judging
        )
    return conclude(plan.config, plan.queries, training, serving, paths, looked=looked)


@dataclass(frozen=True)
class Plan:
    """A run whose whole input was read and checked, before anything is started, asked or written.

    Attributes:
        config: with what its input brought along written into its policy.
        queries: as both arms will be asked them.
    """

    config: GateConfig
    queries: QuerySet
    training: ArmSource
    serving: ArmSource

    @property
    def samples(self) -> int:
        """Requests of both arms, without retries."""
        return 2 * len(self.queries.queries) * self.config.policy.repeats

    @property
    def most_tokens(self) -> int:
        """Answer tokens of both arms when every answer runs to its limit."""
        return 2 * self.config.policy.repeats * sum(query.max_tokens for query in self.queries.queries)


def prepare(config: GateConfig) -> Plan:
    """Reads and checks all input of a run; starts, asks and writes nothing.

    Raises:
        ConfigError: a flag, file or directory cannot be used.
    """
    if config.key is not None:
        load_private_key(config.key)
    redactor = None if config.redact is None else load_redactor(config.redact)
    if redactor is not None:
        config = replace(config, policy=config.policy.model_copy(update={"redaction": redactor.name}))
    specs = (config.queries,) if isinstance(config.queries, str) else config.queries
    queries = open_all(specs)
    if redactor is not None:
        queries = redact(queries, redactor)
    queries = queries.sample(config.policy.max_queries, config.policy.sample_seed)
    permissions = replace(config.permissions, judge=config.judge is not None)
    check_allowed(((query.id, query.checker) for query in queries.queries), permissions)
    for query in queries.queries:
        request_body(query, config.policy)
    endpoint = Endpoint(url="", timeout_s=config.timeout_s, concurrency=config.concurrency)
    sources = [
        resolve(role, arm.spec, replace(endpoint, url=arm.spec, api_key=arm.api_key, model=arm.model), arm.checkpoint)
        for role, arm in ((Role.TRAINING, config.training), (Role.SERVING, config.serving))
    ]
    schedule(queries.queries, config.policy.looks)
    return Plan(config, queries, *sources)


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


async def _gather(
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
            if two.refused or (looked < len(plan) and judge(policy, queries, *arms, looked=looked).final):
                break
    return *arms, looked


def conclude(
    config: GateConfig,
    queries: QuerySet,
    training: ArmResults,
    serving: ArmResults,
    paths: GatePaths,
    *,
    looked: int | None = None,
) -> GateResult:
    """Writes the final results, decides, and writes verdict, envelope and reports.

    `looked` is the number of looks taken; None is all that the policy plans.
    """
    records: Iterable[SampleRecord | ArmRecord] = [
        ArmRecord(role=Role.TRAINING, evidence=training.evidence),
        *training.samples,
        ArmRecord(role=Role.SERVING, evidence=serving.evidence),
        *serving.samples,
    ]
    digest = write_results(paths.results, records)
    verdict = decide(config.policy, queries, training, serving, results_digest=digest, looked=looked)
    write_reports(verdict, config.out)
    if config.key is not None and paths.envelope is not None:
        sign_verdict(verdict, config.key, paths.envelope)
    return GateResult(verdict, paths)


def _prepare(config: GateConfig) -> GatePaths:
    out = config.out
    reports = ReportPaths.below(out)
    paths = GatePaths(
        results=out / "results.jsonl",
        verdict=reports.verdict,
        envelope=out / "verdict.dsse.json" if config.key is not None else None,
        html=reports.html,
        markdown=reports.markdown,
        junit=reports.junit,
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
        for path in (paths.verdict, out / "verdict.dsse.json", paths.html, paths.markdown, paths.junit):
            path.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {out}: cannot be written: {exc.strerror}", field="out") from exc
    return paths


def _recorded(config: GateConfig, results: Path) -> Recorded:
    """Reads earlier records, and cuts the own results file back to its complete lines so that it can be continued."""
    others = [record for path in config.reuse for record in read_results(path)]
    own: list[SampleRecord | ArmRecord] = []
    if config.resume and results.exists():
        own = read_results(results)
        write_results(results, own)
    return Recorded(own, others)
