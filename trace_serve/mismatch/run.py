"""One measurement: rollouts on the engine, then every variant of the training side against them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trace_serve.mismatch.metrics import Distance
from trace_serve.mismatch.probe import advice
from trace_serve.mismatch.quads import roll_out_quads
from trace_serve.mismatch.rollout import Rollout, Sampling, roll_out
from trace_serve.mismatch.sites import SiteShares
from trace_serve.mismatch.subject import Subject
from trace_serve.mismatch.trainer import Trainer, cosines
from trace_serve.mismatch.variants import VARIANTS, Variant, probes

REFERENCE = "replay"
"""The variant whose gradient the others are compared with."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        prompts, tokens: rollouts, and sampled tokens of each.
        temperature: of sampling.
        top: most probable tokens of a position that distributions are compared on.
        mid: whether the engine keeps hints of the experts' second product too.
        quads: whether rollouts of QUADS are sampled and measured too.
        gradients: rollouts whose gradients are compared; 0 leaves them out.
        probe: whether variants that do without some hints are measured too.
        threads: of torch, for the training side. Threads that wait for each other on busy cores are slower than one.
    """

    prompts: int = 8
    tokens: int = 64
    temperature: float = 1.0
    top: int = 1000
    mid: bool = False
    quads: bool = True
    gradients: int = 0
    probe: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """One variant; `gradient` is the mean cosine to the reference by layer, empty where it was not computed."""

    variant: Variant
    distance: Distance
    router: tuple[float, ...]
    sites: dict[str, SiteShares]
    gradient: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Everything that a report shows.

    Attributes:
        hint_bytes: a token, at the sites that were kept: lowest bits and scale bytes.
        advice: what the probe recommends, or None.
    """

    subject: Subject
    options: Options
    sites: tuple[str, ...]
    hint_bytes: int
    rows: tuple[Row, ...]
    probes: tuple[Row, ...]
    advice: str | None


def measure(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    log_path: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Samples rollouts and compares every training-time version with them.

    Args:
        subject: the model and the recipe of its rollouts.
        prompts: token ids.
        options: what to measure.
        log_path: file for the engine's output.
        progress: told what goes on.

    Raises:
        ConfigError: the model has parts that cannot be quantized in transformers.
        EngineError: the engine or the model failed.
    """
    torch.set_num_threads(options.threads)
    sampling = Sampling(options.tokens, options.temperature, options.top)
    sites = subject.sites(mid=options.mid)
    engine = roll_out(
        subject.path, subject.recipe, prompts, sampling, sites=sites, log_path=log_path, progress=progress
    )
    quads: list[Rollout] = []
    # The second pass is one over activations.
    if options.quads and subject.recipe.experts == "w4a4":
        quads = roll_out_quads(subject.path, subject.recipe, prompts, sampling, progress)
    variants = [variant for variant in VARIANTS if quads or not variant.quads]
    probed = [each for each in probes(subject.dims.layers) if options.probe and _applies(each, sites)]
    found = _rows(subject, engine, quads, [*variants, *probed], options, progress)
    rows = tuple(found[variant.key] for variant in variants)
    extra = tuple(found[variant.key] for variant in probed)
    return Measurement(
        subject=subject,
        options=options,
        sites=sites,
        hint_bytes=sum(replace(site, codes=None).bytes_per_token for site in engine[0].hints.sites),
        rows=rows,
        probes=extra,
        advice=advice(subject.dims, found["qat"], found["trace"], extra) if extra else None,
    )


def _applies(probe: Variant, sites: Sequence[str]) -> bool:
    """Whether a choice of sites leaves out some of those that there are, and not all."""
    return probe.sites is None or 0 < len(set(probe.sites) & set(sites)) < len(sites)


def _rows(
    subject: Subject,
    engine: Sequence[Rollout],
    quads: Sequence[Rollout],
    variants: Sequence[Variant],
    options: Options,
    progress: Callable[[str], None],
) -> dict[str, Row]:
    """Variants grouped by what the model is quantized under, so that one model is in memory at a time."""
    groups: dict[Any, list[Variant]] = {}
    # The group with the reference gradient first, and in it the reference.
    for variant in sorted(variants, key=lambda each: each.key != REFERENCE):
        groups.setdefault(variant.recipe(subject.recipe), []).append(variant)
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="trace-mismatch-") as references:
        for recipe, members in groups.items():
            progress("loading the model in transformers")
            trainer = Trainer(subject.path, recipe, subject.recipe)
            for variant in members:
                progress(f"measuring {variant.label} ({len(found) + 1} of {len(variants)})")
                listed = variant in VARIANTS
                measured = trainer.measure(variant, quads if variant.quads else engine, sites=listed)
                gradient: tuple[float, ...] = ()
                if listed and not variant.quads:
                    gradient = _gradient(trainer, variant, engine[: options.gradients], Path(references))
                found[variant.key] = Row(variant, measured.distance, measured.router, measured.sites, gradient)
    return found


def _gradient(trainer: Trainer, variant: Variant, rollouts: Sequence[Rollout], references: Path) -> tuple[float, ...]:
    """Mean over rollouts of the cosine to the reference by layer.

    The reference itself leaves its gradients in the directory: as large as the model each, they stay out of memory.
    """
    each = []
    for index, rollout in enumerate(rollouts):
        own, place = trainer.gradients(variant, rollout), references / f"{index}.pt"
        if variant.key == REFERENCE:
            torch.save(own, place)
        each.append(cosines(own, torch.load(place, mmap=True)))
    return tuple(torch.stack(each).mean(dim=0).tolist()) if each else ()
