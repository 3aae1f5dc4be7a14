"""What an attribution is about: model, recipe, queries and budget, read and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.attribute.answers import Recording
from eval_gate.attribute.cost import DEFAULT_KV_TOKENS, CostModel
from eval_gate.attribute.variants import Layout
from eval_gate.checkers import Permissions, PoolLimits, check_allowed
from eval_gate.execute import request_body
from eval_gate.policy import GatePolicy
from eval_gate.queries import QuerySet
from eval_gate.stats.floor import queries_needed, zero_discordance_floor
from eval_gate.suites.named import open_all
from trace_serve.errors import ConfigError, TraceServeError
from trace_serve.policy.dims import ModelDims, load_dims
from trace_serve.policy.layouts import detect
from trace_serve.policy.manifest import load_policy
from trace_serve.policy.model import ModelShape, check_recipe_fits
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.recipe import Recipe


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
        rounding: queries whose answers under the recipe are asked for once more with hints, by an engine beyond the
            budget, and scored by the training-time version; 0 leaves it out.
        kv_tokens: tokens of KV cache that remedies of weights and of KV cache are weighed at.
    """

    model: Path
    queries: tuple[str, ...]
    out: Path
    recipe: Recipe | None = None
    policy: GatePolicy = field(default_factory=GatePolicy)
    budget: int = 20
    max_wall_s: float | None = None
    rounding: int = 0
    kv_tokens: int = DEFAULT_KV_TOKENS
    recording: Recording = field(default_factory=Recording)
    concurrency: int = 8
    timeout_s: float = 120.0
    startup_timeout_s: float = 600.0
    permissions: Permissions = field(default_factory=Permissions)
    graders: PoolLimits = field(default_factory=PoolLimits)


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
    if config.rounding and not recipe.has_hints:
        raise ConfigError(
            "--rounding: the recipe rounds nothing while serving, so there are no hints; leave it out", field="rounding"
        )
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
