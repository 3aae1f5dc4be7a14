"""What the user names as an arm: a URL, a model or policy directory, a model in transformers, or recorded results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval_gate.arms import engine
from eval_gate.arms.base import Arm
from eval_gate.arms.checkpoint import read_checkpoint
from eval_gate.arms.defaults import read_defaults
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.arms.records import ArmRecord, Role, SampleRecord, read_results
from trace_serve.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    from trace_serve.recipe import Recipe


RECORDED = "results:"
TRANSFORMERS = "hf:"


@dataclass(frozen=True)
class ArmSource:
    """One arm before it is reached.

    Attributes:
        role: training-time or serving-time version.
        directory: what an engine of ours is started from; None for an arm that needs none.
        endpoint: where to send requests; for a directory, its concurrency and time-outs.
        recipe: what the engine is started with, or the trainer fake-quantizes under; None is BF16.
        evidence: what is known before anything runs.
        recorded: results of an earlier run that are the whole arm; None for an arm that can be asked.
        model: directory of a model that transformers runs in this process.
    """

    role: Role
    directory: Path | None
    endpoint: Endpoint
    recipe: Recipe | None
    evidence: ArmEvidence
    recorded: tuple[SampleRecord, ...] | None = None
    model: Path | None = None

    @asynccontextmanager
    async def open(self, startup_timeout_s: float, log: Path) -> AsyncIterator[Arm]:
        """The arm, with an engine of our own behind it while the context lasts if this is a directory."""
        if self.model is not None:
            from eval_gate.arms.transformers import TransformersArm

            async with TransformersArm(self.model, self.recipe, self.evidence) as arm:
                yield arm
        elif self.directory is None:
            async with HttpArm(self.endpoint, ask_root=self.evidence.checkpoint is not None) as http:
                yield http
        else:
            async with (
                engine.running(
                    self.directory, self.recipe, self.evidence.artifact_digest, self.endpoint, startup_timeout_s, log
                ) as endpoint,
                HttpArm(endpoint) as http,
            ):
                yield http


def resolve(role: Role, spec: str, endpoint: Endpoint, checkpoint: Path | None = None) -> ArmSource:
    """Reads what `--training` or `--serving` names.

    - `http://...`: an OpenAI-compatible endpoint.
    - a directory: an engine of ours. A policy is BF16 as the training arm and its own recipe as the serving arm; a
      directory without `policy.json` can only be the training arm.
    - `hf:DIR` or `hf:DIR@RECIPE` (training arm): the model as Hugging Face transformers computes it, in BF16 or
      fake-quantized under a recipe (a preset, a file, or `policy` for the policy's own).
    - `results:FILE`: the answers that a `results.jsonl` holds for this role.

    Args:
        checkpoint: directory of what an endpoint serves, for one that does not report on itself.

    Raises:
        ConfigError: none of these, or not usable; `field` is the flag.
    """
    if spec.startswith(("http://", "https://")):
        return _endpoint(role, _without_userinfo(spec, role), endpoint, checkpoint)
    if checkpoint is not None:
        raise ConfigError(
            f"--{role}-checkpoint: belongs to a URL, but --{role} is {spec!r}", field=f"{role}_checkpoint"
        )
    if spec.startswith(RECORDED):
        return _recorded(role, Path(spec.removeprefix(RECORDED)), endpoint)
    if spec.startswith(TRANSFORMERS):
        return _transformers(role, spec.removeprefix(TRANSFORMERS), endpoint)
    directory = _directory(role, spec)
    if not (directory / "policy.json").exists() and role is Role.SERVING:
        raise PolicyError(
            f"--serving {spec!r}: no policy.json there; build a policy with `trace-serve policy build`", field=role
        )
    evidence, recipe = _identify(directory, spec)
    if role is Role.TRAINING:
        evidence, recipe = evidence.model_copy(update={"recipe_id": None}), None
    return ArmSource(role, directory, endpoint, recipe, evidence)


def _endpoint(role: Role, url: str, endpoint: Endpoint, checkpoint: Path | None) -> ArmSource:
    if checkpoint is None:
        return ArmSource(role, None, endpoint, None, ArmEvidence(source=url))
    evidence, _ = _identify(_directory(role, str(checkpoint)), url)
    # The digest stays away: that the endpoint serves these very files is the operator's word, not something shown.
    stated = ArmEvidence(source=url, generation=evidence.generation, checkpoint=read_checkpoint(checkpoint))
    return ArmSource(role, None, endpoint, None, stated)


def _identify(directory: Path, spec: str) -> tuple[ArmEvidence, Recipe | None]:
    """What a directory is, and the recipe of a policy."""
    from trace_serve.policy.digest import digest_directory
    from trace_serve.policy.manifest import load_policy

    defaults = read_defaults(directory)
    if not (directory / "policy.json").exists():
        digest = digest_directory(directory)
        evidence = ArmEvidence(source=spec, artifact_digest=digest, base_digest=digest, generation=defaults)
        return evidence, None
    policy = load_policy(directory)
    evidence = ArmEvidence(
        source=spec,
        artifact_digest=policy.digest,
        base_digest=policy.base_digest,
        recipe_id=policy.recipe_id,
        policy_name=policy.name,
        policy_version=policy.version,
        generation=defaults,
    )
    return evidence, policy.recipe


def _transformers(role: Role, spec: str, endpoint: Endpoint) -> ArmSource:
    if role is Role.SERVING:
        raise ConfigError(
            f"--serving hf:{spec}: transformers is how a trainer computes, not how a policy is served; "
            "give the policy directory or its endpoint",
            field=role,
        )
    from trace_serve.policy.model import ModelShape, check_recipe_fits
    from trace_serve.policy.tokenizer import read_json_object

    name, _, recipe_spec = spec.rpartition("@") if "@" in spec and not Path(spec).is_dir() else (spec, "", "")
    directory = _directory(role, name)
    evidence, own = _identify(directory, f"hf:{spec}")
    recipe = None
    if recipe_spec == "policy":
        if own is None:
            raise PolicyError(f"--{role} hf:{spec}: no policy.json there, so it has no recipe; name one", field=role)
        recipe = own
    elif recipe_spec:
        from trace_serve.recipe import load_recipe

        recipe = load_recipe(recipe_spec)
    if recipe is not None:
        check_recipe_fits(recipe, ModelShape.from_config(read_json_object(directory / "config.json")))
    identity = {"runtime": "transformers", "recipe_id": recipe.recipe_id if recipe else None}
    return ArmSource(role, None, endpoint, recipe, evidence.model_copy(update=identity), model=directory)


def _recorded(role: Role, path: Path, endpoint: Endpoint) -> ArmSource:
    records = read_results(path)
    evidence = next((r.evidence for r in reversed(records) if isinstance(r, ArmRecord) and r.role is role), None)
    if evidence is None:
        raise ConfigError(f"--{role} results:{path}: holds no {role} arm, expected one", field=role)
    samples = tuple(r for r in records if isinstance(r, SampleRecord) and r.role is role)
    return ArmSource(role, None, endpoint, None, evidence, recorded=samples)


def _directory(role: Role, spec: str) -> Path:
    directory = Path(spec)
    if not directory.is_dir():
        raise ConfigError(
            f"--{role} {spec!r}: neither a URL (http://...) nor a directory; give a model, a policy or an endpoint",
            field=role,
        )
    return directory


def _without_userinfo(url: str, role: Role) -> str:
    if "@" in url.split("//", 1)[1].split("/", 1)[0]:
        raise ConfigError(
            f"--{role}: the URL carries a password, which would be printed in reports; use --{role}-key-env", field=role
        )
    return url
