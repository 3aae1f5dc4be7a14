"""One gate run from start to signed verdict; what the command line and other programs call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import (
    ArmRecord,
    Role,
    SampleRecord,
    read_results,
    write_atomic,
    write_results,
)
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.decide import ArmResults, decide, judge
from eval_gate.looks import schedule
from eval_gate.policy import GatePolicy
from eval_gate.preflight import check_arm, compare_arms
from eval_gate.queries import QuerySet, load_queries
from eval_gate.report.html import render_html
from eval_gate.report.markdown import render_markdown
from eval_gate.session import OnProgress, Recorded, Sessions
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
    schedule(queries.queries, config.policy.looks)
    paths = _prepare(config)
    sessions = Sessions(
        queries,
        config.policy,
        paths.results,
        _recorded(config, paths.results),
        config.startup_timeout_s,
        on_progress or (lambda progress: None),
    )
    training, serving, looked = await _gather(config.policy, queries, sources[0], sources[1], sessions)
    return conclude(config, queries, training, serving, paths, looked=looked)


async def _gather(
    policy: GatePolicy, queries: QuerySet, training: ArmSource, serving: ArmSource, sessions: Sessions
) -> tuple[ArmResults, ArmResults, int | None]:
    """Samples both arms, look by look, until the results decide; also gives the number of looks taken (None = all)."""
    plan = schedule(queries.queries, policy.looks)
    # Two engines of ours never share the machine; then the training arm is complete before the serving arm starts.
    together = policy.looks > 1 and (training.directory is None or serving.directory is None)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(sessions.open(training))
        if not together:
            await one.sample([query for part in plan for query in part])
            await stack.aclose()
        if sessions.must_stop(compare_arms(one.evidence, serving.evidence), check_arm(Role.TRAINING, one.evidence)):
            return ArmResults(one.evidence, one.samples), ArmResults(serving.evidence, []), None
        two = await stack.enter_async_context(sessions.open(serving, against=one.evidence))
        for looked, part in enumerate(plan, start=1):
            if together and not two.refused:
                await one.sample(part)
            await two.sample(part)
            arms = ArmResults(one.evidence, one.samples), ArmResults(two.evidence, two.samples)
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
    write_atomic(paths.verdict, (verdict.model_dump_json(indent=2) + "\n").encode())
    write_atomic(paths.html, render_html(verdict).encode())
    write_atomic(paths.markdown, render_markdown(verdict).encode())
    if config.key is not None and paths.envelope is not None:
        sign_verdict(verdict, config.key, paths.envelope)
    return GateResult(verdict, paths)


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


def _recorded(config: GateConfig, results: Path) -> Recorded:
    """Reads earlier records, and cuts the own results file back to its complete lines so that it can be continued."""
    others = [record for path in config.reuse for record in read_results(path)]
    own: list[SampleRecord | ArmRecord] = []
    if config.resume and results.exists():
        own = read_results(results)
        write_results(results, own)
    return Recorded(own, others)
