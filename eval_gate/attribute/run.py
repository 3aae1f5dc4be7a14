"""One attribution from start to report; what the command line and other programs call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role, SampleRecord, write_atomic
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.attribute.answers import Answered, Answers, Recording
from eval_gate.attribute.conclusions import conclude
from eval_gate.attribute.conduct import count_refusals
from eval_gate.attribute.cost import CostModel
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
from eval_gate.attribute.search import Findings, Search, drive
from eval_gate.attribute.trials import Trial
from eval_gate.attribute.variants import Layout, Part, describe, in_bf16
from eval_gate.budget import Budget
from eval_gate.checkers import GraderPool, Permissions, PoolLimits, check_allowed
from eval_gate.decide import ArmResults, tool_versions
from eval_gate.execute import request_body
from eval_gate.flips import flipped_queries
from eval_gate.pairing import summarize
from eval_gate.policy import GatePolicy
from eval_gate.queries import QuerySet
from eval_gate.stats.floor import queries_needed, zero_discordance_floor
from eval_gate.suites.named import open_all, stored
from eval_gate.verdict import ArmSummary
from trace_serve.errors import ConfigError, TraceServeError
from trace_serve.plan import Workload
from trace_serve.policy.dims import ModelDims, load_dims
from trace_serve.policy.layouts import detect
from trace_serve.policy.manifest import load_policy
from trace_serve.policy.model import ModelShape, check_recipe_fits
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.recipe import Recipe

DEFAULT_KV_TOKENS = Workload().batch * Workload().context
"""Tokens of KV cache of the workload that `trace-serve plan` assumes."""


@dataclass(frozen=True)
class AttributeConfig:
    """One attribution.

    Attributes:
        model: directory with BF16 weights: a model, or a policy whose experts are not packed.
        queries: suites or query files, as `GateConfig.queries`.
        out: directory for answers and reports; made when missing. What it holds from an earlier run is used.
        recipe: whose gap is to be explained; None is the policy's own.
        policy: margin, rule and sampling of the gate; it is looked at once, whatever `looks` says.
        budget: engines at most, the BF16 one included. Recorded answers count as well, so that an interrupted run ends
            as an uninterrupted one would.
        max_wall_s: seconds after which nothing more is asked.
        kv_tokens: tokens of KV cache that remedies of weights and of KV cache are weighed at.
    """

    model: Path
    queries: tuple[str, ...]
    out: Path
    recipe: Recipe | None = None
    policy: GatePolicy = field(default_factory=GatePolicy)
    budget: int = 16
    max_wall_s: float | None = None
    kv_tokens: int = DEFAULT_KV_TOKENS
    recording: Recording = field(default_factory=Recording)
    concurrency: int = 8
    timeout_s: float = 120.0
    startup_timeout_s: float = 600.0
    permissions: Permissions = field(default_factory=Permissions)
    graders: PoolLimits = field(default_factory=PoolLimits)


@dataclass(frozen=True)
class StepProgress:
    """Where an attribution stands: engine number `engine` of at most `budget`, answering under `label`."""

    engine: int
    budget: int
    label: str
    done: int
    total: int
    reading: Reading | None = None


@dataclass(frozen=True)
class Subject:
    """A model and a recipe that were read and checked, before anything is started."""

    config: AttributeConfig
    source: ArmSource
    recipe: Recipe
    queries: QuerySet
    shape: ModelShape
    dims: ModelDims

    @property
    def layout(self) -> Layout:
        return Layout(self.shape.expert_layers, self.shape.attention_layers, self.shape.head_dim)

    @property
    def cost(self) -> CostModel:
        return CostModel(self.dims, self.layout, self.config.kv_tokens)

    def refuses(self, recipe: Recipe) -> str | None:
        """Why no engine would serve the model under a recipe; None if one would."""
        try:
            check_recipe_fits(recipe, self.shape)
        except TraceServeError as exc:
            return str(exc)
        return None if recipe.exact_in_bf16 else "its global scales are not powers of two"

    @property
    def too_few(self) -> str | None:
        """Why no recipe can pass with these queries; None if one can."""
        policy = self.config.policy
        if policy.rule == "point" or policy.margin_kind == "relative" or policy.mode == "fixed-set":
            return None
        units = len({query.cluster or ("", query.id) for query in self.queries.queries})
        if zero_discordance_floor(units, policy.alpha) < policy.margin:
            return None
        needed = queries_needed(policy.margin, policy.alpha)
        return (
            f"remedies: with {units} independent queries no recipe can pass a margin of {100 * policy.margin:g} "
            f"points, at least {needed} are needed"
        )


def check(config: AttributeConfig) -> Subject:
    """Reads and checks all input; starts, asks and writes nothing.

    Raises:
        ConfigError: a flag, file or directory cannot be used.
    """
    if config.budget < 2:
        raise ConfigError(f"--budget {config.budget}: expected 2 engines or more, BF16 and the recipe", field="budget")
    if config.kv_tokens < 1:
        raise ConfigError(f"--kv-tokens {config.kv_tokens}: expected 1 or more", field="kv_tokens")
    if not (config.model / "config.json").is_file():
        raise ConfigError(
            f"--model {config.model}: no config.json there; expected a model or policy directory", field="model"
        )
    if detect(config.model) is not None:
        raise ConfigError(
            f"--model {config.model}: its experts are packed under one recipe; give the directory with BF16 weights",
            field="model",
        )
    endpoint = Endpoint(url="", timeout_s=config.timeout_s, concurrency=config.concurrency)
    source = resolve(Role.TRAINING, str(config.model), endpoint)
    recipe = config.recipe
    if recipe is None:
        if not (config.model / "policy.json").is_file():
            raise ConfigError(
                "--recipe: the model is no policy, so it has no recipe of its own; name one", field="recipe"
            )
        recipe = load_policy(config.model).recipe
    if recipe.is_bf16:
        raise ConfigError("--recipe: it quantizes nothing, so there is no gap to attribute", field="recipe")
    config = replace(config, policy=config.policy.model_copy(update={"looks": 1}))
    queries = open_all(config.queries).sample(config.policy.max_queries, config.policy.sample_seed)
    check_allowed(((query.id, query.checker) for query in queries.queries), config.permissions)
    for query in queries.queries:
        request_body(query, config.policy)
    shape = ModelShape.from_config(read_json_object(config.model / "config.json"))
    subject = Subject(config, source, recipe, queries, shape, load_dims(str(config.model)))
    reason = subject.refuses(recipe)
    if reason is not None:
        raise ConfigError(f"--recipe: {reason}", field="recipe")
    return subject


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
        return self._result(found)

    async def _evaluate(self, trial: Trial) -> Reading | None:
        begin = time.monotonic()
        self._engine, self._label, self._done = self._engine + 1, trial.label, 0
        self._report()
        answered = await self._answers.of(trial.recipe)
        if not answered.complete:
            return None
        reading = self._read(answered.results)
        self._note(trial, reading, answered, time.monotonic() - begin)
        self._on_progress(replace(self._progress(), reading=reading))
        return reading

    def _read(self, serving: ArmResults) -> Reading:
        policy = self._config.policy
        reading = read(policy, self._subject.queries, self._bf16.results, serving)
        rate = reading.training.pass_rate_low
        if rate is not None and rate < policy.baseline_floor:
            raise ConfigError(
                f"--queries: the BF16 answers pass {100 * rate:.1f}%, expected at least "
                f"{100 * policy.baseline_floor:g}% (--baseline-floor); what a model cannot do it cannot lose",
                field="queries",
            )
        return reading

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

    def _result(self, found: Findings) -> Attribution:
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
            conclusions=conclude(found, subject.recipe, config.policy, cost),
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
            flipped=flipped_queries(found.whole.pairs) if found.whole else (),
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
