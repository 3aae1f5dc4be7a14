"""One measurement: rollouts on the engine, then every variant of the training side against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError
from trace_serve.mismatch.metrics import Distance
from trace_serve.mismatch.rollout import Rollout, roll_out
from trace_serve.mismatch.variants import PROBES, VARIANTS, Variant
from trace_serve.plan.schemes import scheme
from trace_serve.policy.dims import load_dims
from trace_serve.policy.manifest import Policy

REFERENCE = "trace"
"""The variant whose gradient the others are compared with."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        prompts, tokens: rollouts, and sampled tokens of each.
        temperature: of sampling.
        sites: hint sites that the engine keeps.
        gradients: rollouts whose gradients are compared; 0 leaves them out.
        probe: whether variants that skip layers are measured too.
    """

    prompts: int = 8
    tokens: int = 64
    temperature: float = 1.0
    sites: tuple[str, ...] = ("experts_in", "k", "v")
    gradients: int = 0
    probe: bool = False


@dataclass(frozen=True)
class Row:
    """One variant's distances."""

    variant: Variant
    distance: Distance


@dataclass(frozen=True)
class Measurement:
    """Everything that a report shows."""

    policy: str
    recipe_id: str
    options: Options
    hint_bytes_per_token: int
    rows: tuple[Row, ...]
    probes: tuple[Row, ...]
    advice: str | None


def measure(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    log_path: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measures a policy whose weights are BF16 on disk.

    Args:
        policy: the policy; its directory is both the rollout's model and the trainer's.
        prompts: token ids.
        options: what to measure.
        log_path: file for the engine's output.
        progress: told what goes on.

    Raises:
        ConfigError: packed weights, or a recipe that quantizes nothing.
        EngineError: the engine or the model failed.
    """
    if policy.format != "bf16":
        raise ConfigError(
            f"{policy.path}: experts are packed on disk, expected BF16; measure the policy that they were built from",
            field="policy",
        )
    if policy.recipe.experts == "bf16" and policy.recipe.kv == "bf16":
        raise ConfigError(f"{policy.path}: its recipe quantizes nothing, so there is no mismatch", field="recipe")
    rollouts = roll_out(
        policy.path,
        policy.recipe,
        prompts,
        tokens=options.tokens,
        temperature=options.temperature,
        sites=options.sites,
        log_path=log_path,
        progress=progress,
    )
    variants = (*VARIANTS, *(PROBES if options.probe else ()))
    found = _distances(policy, rollouts, variants, options, progress)
    rows = tuple(Row(variant, found[variant.key]) for variant in VARIANTS)
    probes = tuple(Row(variant, found[variant.key]) for variant in PROBES if variant.key in found)
    return Measurement(
        policy=f"{policy.name}@{policy.version}",
        recipe_id=policy.recipe_id,
        options=options,
        hint_bytes_per_token=sum(site.bytes_per_token for site in rollouts[0].hints.sites),
        rows=rows,
        probes=probes,
        advice=_advice(policy, found, probes) if probes else None,
    )


def _distances(
    policy: Policy,
    rollouts: Sequence[Rollout],
    variants: Sequence[Variant],
    options: Options,
    progress: Callable[[str], None],
) -> dict[str, Distance]:
    """Variants grouped by what the model is quantized under, so that one model is in memory at a time."""
    from trace_serve.mismatch.trainer import Trainer, cosine

    groups: dict[Any, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.recipe(policy.recipe), []).append(variant)
    # The group with the reference gradient first.
    ordered = sorted(groups.items(), key=lambda item: all(variant.key != REFERENCE for variant in item[1]))
    found: dict[str, Distance] = {}
    references: list[Any] = []
    for recipe, members in ordered:
        trainer = Trainer(policy.path, recipe, policy.recipe)
        for variant in sorted(members, key=lambda each: each.key != REFERENCE):
            progress(f"measuring {variant.label}")
            distance = trainer.measure(variant, rollouts)
            if options.gradients and variant in VARIANTS:
                own = [trainer.gradients(variant, rollout) for rollout in rollouts[: options.gradients]]
                if variant.key == REFERENCE:
                    references = own
                cosines = [cosine(mine, reference) for mine, reference in zip(own, references, strict=True)]
                distance = replace(distance, gradient_cosine=sum(cosines) / len(cosines))
            found[variant.key] = distance
    return found


def _advice(policy: Policy, found: dict[str, Distance], probes: Sequence[Row]) -> str:
    """Which layers need hints, and what that costs: the cheapest probe that loses little against all layers."""
    everything, nothing = found[REFERENCE].k3, found["qat"].k3
    enough = everything + 0.05 * max(nothing - everything, 0.0)
    dims = load_dims(str(policy.path))
    full = scheme("default").bytes_per_token(dims)
    fewer = [row for row in probes if len(row.variant.layers(dims.layers)) < dims.layers]
    good = [row for row in fewer if row.distance.k3 <= enough]
    if not good:
        return f"every layer needs hints ({full:,.0f} B a token): each smaller choice loses more than 5 % of the gain"

    def cost(row: Row) -> float:
        layers = row.variant.layers(dims.layers)
        return full * len(layers) / dims.layers

    best = min(good, key=cost)
    return (
        f"{best.variant.label.removeprefix('TRACE ')}: k3 {best.distance.k3:.4f} against {everything:.4f} with all "
        f"layers, about {cost(best):,.0f} of {full:,.0f} B a token"
    )
