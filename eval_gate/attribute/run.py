"""One attribution from start to report; what the command line and other programs call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from eval_gate.arms.records import SampleRecord, write_atomic
from eval_gate.attribute.answers import Answered, Answers
from eval_gate.attribute.conclusions import conclude
from eval_gate.attribute.conduct import count_refusals
from eval_gate.attribute.drift import token_drift
from eval_gate.attribute.html import render_html
from eval_gate.attribute.readings import Reading, Standing, contrast, read
from eval_gate.attribute.result import (
    ActivationResult,
    Attribution,
    LayerResult,
    PartResult,
    Remedy,
    Step,
)
from eval_gate.attribute.rounding import RoundingShare, rounding_share
from eval_gate.attribute.search import Findings, Search, drive
from eval_gate.attribute.subject import AttributeConfig, Subject, check
from eval_gate.attribute.trials import Stage, Trial
from eval_gate.attribute.variants import Part, describe, in_bf16
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool
from eval_gate.decide import tool_versions
from eval_gate.flips import flipped_queries
from eval_gate.pairing import summarize
from eval_gate.policy import GatePolicy
from eval_gate.suites.named import stored
from eval_gate.verdict import ArmSummary, FlippedQuery
from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class StepProgress:
    """Where an attribution stands: engine number `engine` of at most `budget`, answering under `label`."""

    engine: int
    budget: int
    label: str
    done: int
    total: int
    reading: Reading | None = None


def attribute(config: AttributeConfig, on_progress: Callable[[StepProgress], None] | None = None) -> Attribution:
    """Runs the attribution in this thread, with its own event loop, and writes `attribution.json` and `.html`.

    Raises:
        ConfigError: the input cannot be used, or the BF16 answers are too weak to lose anything.
        EngineError: an engine did not start or stopped answering. What was answered stays in `out`.
    """
    subject = check(config)
    try:
        (config.out / "answers").mkdir(parents=True, exist_ok=True)
        # Findings of an earlier run must not be taken for this one's when it is interrupted.
        for path in _reports(config.out):
            path.unlink(missing_ok=True)
        stored(subject.queries, config.out)
    except OSError as exc:
        raise ConfigError(f"--out {config.out}: cannot be written: {exc.strerror}", field="out") from exc
    found = asyncio.run(_Attribution(subject, on_progress or (lambda progress: None)).run())
    for path, text in zip(
        _reports(config.out), (found.model_dump_json(indent=2) + "\n", render_html(found)), strict=True
    ):
        write_atomic(path, text.encode())
    return found


def _reports(out: Path) -> tuple[Path, Path]:
    return out / "attribution.json", out / "attribution.html"


class _Attribution:
    """The state of one run: the BF16 answers, and a step for each trial."""

    def __init__(self, subject: Subject, on_progress: Callable[[StepProgress], None]) -> None:
        self._subject = subject
        self._config = subject.config
        self._on_progress = on_progress
        self._steps: list[Step] = []
        self._flipped: tuple[FlippedQuery, ...] = ()
        self._label = "BF16"
        self._engine = 1
        self._done = 0

    async def run(self) -> Attribution:
        subject, config = self._subject, self._config
        async with GraderPool(config.graders) as graders:
            self._answers = Answers(
                subject.source,
                subject.queries,
                config.policy,
                config.out / "answers",
                recording=config.recording,
                graders=graders,
                budget=Budget(max_wall_s=config.max_wall_s),
                startup_timeout_s=config.startup_timeout_s,
                on_sample=self._sampled,
            )
            self._report()
            self._bf16 = await self._answers.of(None)
            if self._bf16.complete:
                self._check_baseline()
            search = Search(
                subject.recipe,
                subject.layout,
                engines=config.budget - 1 if self._bf16.complete else 0,
                cost=subject.cost,
                refuses=subject.refuses,
                too_few=subject.too_few,
            )
            found = await drive(search.run(), self._evaluate)
        if not self._bf16.complete:
            found.stopped = "wall"
        return self._result(found, await self._rounding(found))

    async def _rounding(self, found: Findings) -> RoundingShare | None:
        """Nothing where the run's time was over before the recipe had answered: there is nothing to explain then."""
        subject, config = self._subject, self._config
        if not config.rounding or found.whole is None:
            return None
        self._label, self._done = "rounding", 0
        self._report()
        asked = subject.queries.queries[: config.rounding]
        log = config.out / "answers" / "engine-rounding.log"
        return await rounding_share(subject.source, subject.recipe, asked, config.policy, config.startup_timeout_s, log)

    async def _evaluate(self, trial: Trial) -> Reading | None:
        begin = time.monotonic()
        self._engine, self._label, self._done = self._engine + 1, trial.label, 0
        self._report()
        answered = await self._answers.of(trial.recipe)
        if not answered.complete:
            return None
        reading = read(self._config.policy, self._subject.queries, self._bf16.results, answered.results)
        self._note(trial, reading, answered, time.monotonic() - begin)
        if trial.stage is Stage.WHOLE:
            self._flipped = flipped_queries(reading.pairs)
        # Answers with log-probabilities of every token are large, and what is needed of them is taken by now.
        reading = replace(reading, pairs=())
        self._on_progress(replace(self._progress(), reading=reading))
        return reading

    def _check_baseline(self) -> None:
        policy = self._config.policy
        rate = summarize(self._bf16.results.samples).pass_rate_low
        if rate is not None and rate < policy.baseline_floor:
            raise ConfigError(
                f"--queries: the BF16 answers pass {100 * rate:.1f}%, expected at least "
                f"{100 * policy.baseline_floor:g}% (--baseline-floor); what a model cannot do it cannot lose",
                field="queries",
            )

    def _note(self, trial: Trial, reading: Reading, answered: Answered, seconds: float) -> None:
        subject = self._subject
        self._steps.append(
            Step(
                stage=trial.stage,
                label=trial.label,
                described=describe(trial.recipe, subject.layout),
                recipe_id=trial.recipe.recipe_id,
                recipe=trial.recipe.to_dict(),
                outcome=reading.outcome,
                reason=reading.reason,
                comparison=reading.comparison,
                cost=subject.cost(trial.recipe),
                serving=reading.serving,
                refusals=count_refusals(answered.results.samples),
                drift=token_drift(reading.pairs, routing=(subject.shape.layers, subject.shape.top_k)),
                recorded=answered.recorded,
                seconds=seconds,
            )
        )

    def _result(self, found: Findings, rounding: RoundingShare | None) -> Attribution:
        subject, config = self._subject, self._config
        layout, cost = subject.layout, subject.cost
        return Attribution(
            model=str(config.model),
            model_digest=str(subject.source.evidence.artifact_digest),
            described=describe(subject.recipe, layout),
            recipe=subject.recipe.to_dict(),
            recipe_id=subject.recipe.recipe_id,
            policy=config.policy,
            query_source=subject.queries.source,
            query_digest=subject.queries.digest,
            queries=len(subject.queries.queries),
            budget=config.budget,
            bf16=self._bf16_summary(found),
            bf16_refusals=count_refusals(self._bf16.results.samples),
            bf16_cost=cost(in_bf16(in_bf16(subject.recipe, Part.EXPERTS), Part.KV)),
            conclusions=conclude(found, subject.recipe, config.policy, cost)
            + (() if rounding is None else (rounding.sentence,)),
            steps=tuple(self._steps),
            parts=tuple(_part(part, reading) for part, reading in found.parts.items()),
            activations=_activations(found, config.policy),
            layers=tuple(
                LayerResult(part=part, layers=one.layers, resolution=one.resolution, comparison=one.reading.comparison)
                for part, sets in found.layers.items()
                for one in sets
            ),
            remedy=self._remedy(found),
            left_out=tuple(found.left_out),
            stopped=found.stopped,
            flipped=self._flipped,
            rounding=rounding,
            created=datetime.now(UTC),
            tools=tool_versions(),
        )

    def _bf16_summary(self, found: Findings) -> ArmSummary:
        return found.whole.training if found.whole else summarize(self._bf16.results.samples)

    def _remedy(self, found: Findings) -> Remedy | None:
        if found.remedy is None:
            return None
        candidate, reading = found.remedy
        before = self._subject.cost(self._subject.recipe)
        return Remedy(
            label=candidate.label,
            described=describe(candidate.recipe, self._subject.layout),
            recipe_id=candidate.recipe.recipe_id,
            recipe=candidate.recipe.to_dict(),
            comparison=reading.comparison,
            cost=candidate.cost,
            extra_weights_bytes=candidate.cost.weights_bytes - before.weights_bytes,
            extra_kv_bytes_per_token=candidate.cost.kv_bytes_per_token - before.kv_bytes_per_token,
        )

    def _sampled(self, record: SampleRecord) -> None:
        self._done += 1
        self._report()

    def _report(self) -> None:
        self._on_progress(self._progress())

    def _progress(self) -> StepProgress:
        total = len(self._subject.queries.queries) * self._config.policy.repeats
        return StepProgress(self._engine, self._config.budget, self._label, self._done, total)


def _part(part: Part, reading: Reading | None) -> PartResult:
    if reading is None:
        return PartResult(part=part, standing=Standing.UNTESTED, comparison=None)
    return PartResult(part=part, standing=reading.standing, comparison=reading.comparison)


def _activations(found: Findings, policy: GatePolicy) -> ActivationResult | None:
    both = found.parts.get(Part.EXPERTS) or found.whole
    if found.weights is None or both is None:
        return None
    return ActivationResult(
        weights=found.weights.comparison,
        standing=found.weights.standing,
        added=contrast(both, found.weights, policy),
    )
