"""What each training-time version quantizes, guides and knows; and what the probe makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trace_serve.errors import ConfigError, PolicyError
from trace_serve.hints.rows import HintFile, Site
from trace_serve.mismatch.metrics import Scores, distance
from trace_serve.mismatch.probe import advice, hint_bytes
from trace_serve.mismatch.run import Row
from trace_serve.mismatch.subject import open_subject
from trace_serve.mismatch.variants import VARIANTS, Variant, probes
from trace_serve.plan.schemes import scheme
from trace_serve.policy import Policy
from trace_serve.policy.dims import BUILT_IN, dims_from_config
from trace_serve.recipe import Recipe

BY_KEY = {variant.key: variant for variant in (*VARIANTS, *probes(40))}
DIMS = dims_from_config(BUILT_IN["qwen3.5-35b-a3b"], "qwen")


def test_keys_are_distinct() -> None:
    for depth in (1, 2, 3, 8, 40):
        every = [*VARIANTS, *probes(depth)]
        assert len({variant.key for variant in every}) == len(every)
        assert all(len(variant.layers(depth)) for variant in every)


def test_variants_guide_the_layers_they_name() -> None:
    assert list(BY_KEY["trace"].layers(40)) == list(range(40))
    assert list(BY_KEY["trace_deeper_half"].layers(31)) == list(range(15, 31))
    assert list(BY_KEY["skip_first_10"].layers(40)) == list(range(10, 40))
    assert list(BY_KEY["skip_last_10"].layers(40)) == list(range(30))


def test_variants_quantize_what_they_name() -> None:
    rollout = Recipe(k_rotation=16, expert_rotation=16)
    assert BY_KEY["bf16"].recipe(rollout) is None
    assert BY_KEY["trace"].recipe(rollout) == BY_KEY["qat_no_r3"].recipe(rollout) == rollout
    weights_only = BY_KEY["qarl"].recipe(rollout)
    assert weights_only is not None
    assert (weights_only.experts, weights_only.kv, weights_only.expert_rotation) == ("w4a16", "bf16", 16)
    # Where the rollout's weights are BF16, so are those of QaRL.
    assert BY_KEY["qarl"].recipe(Recipe(experts="bf16")) is None


def test_a_variant_sees_only_what_its_hint_file_would_have() -> None:
    rows = 400
    site = Site(
        name="k",
        layers=(0,),
        bits=np.full((rows, 1, 2), 5, dtype=np.uint16),
        scales=np.full((rows, 1, 2), 0x37, dtype=np.uint8),
        present=np.ones(rows, dtype=np.bool_),
    )
    hints = HintFile(np.zeros(rows, dtype=np.int32), (site,), "sha256:0", "", ((0, rows, ""),))
    assert BY_KEY["trace"].seen(hints) is hints
    bits = BY_KEY["scale_bits"].seen(hints).sites[0]
    assert bits.scale_kind == "lsb"
    assert bits.scales is not None
    assert set(bits.scales.flatten()) == {1}
    assert BY_KEY["no_scales"].seen(hints).sites[0].scales is None
    lost = BY_KEY["lost_0.1"].seen(hints).sites[0].present
    assert 0.05 < 1 - lost.mean() < 0.15


def test_bytes_are_those_of_the_plan() -> None:
    full = scheme("default").bytes_per_token(DIMS)
    assert hint_bytes(DIMS, BY_KEY["trace"]) == full
    parts = hint_bytes(DIMS, BY_KEY["inputs_only"]) + hint_bytes(DIMS, BY_KEY["kv_only"])
    assert parts == full
    assert hint_bytes(DIMS, BY_KEY["skip_first_20"]) == full / 2


def row(variant: Variant, kl: float) -> Row:
    return Row(variant, distance([Scores(np.zeros(1), np.array([kl]), np.ones(1, dtype=np.bool_))]), (), {})


def test_the_probe_recommends_the_cheapest_choice_that_keeps_the_gain() -> None:
    nearest, everything = row(BY_KEY["qat"], 0.4), row(BY_KEY["trace"], 0.0)
    probed = [row(BY_KEY["skip_first_1"], 0.001), row(BY_KEY["skip_first_5"], 0.019), row(BY_KEY["skip_last_10"], 0.03)]
    found = advice(DIMS, nearest, everything, probed)
    assert "without the first 5 layers is enough" in found
    assert f"{hint_bytes(DIMS, BY_KEY['skip_first_5']):,.0f} of {hint_bytes(DIMS, BY_KEY['trace']):,.0f} B" in found
    # Scale bits cost no layer less, so they are no answer to which layers need hints.
    needed = advice(DIMS, nearest, everything, [probed[2], row(BY_KEY["scale_bits"], 0.0)])
    assert "every layer and site needs hints" in needed


def test_a_policy_has_its_own_recipe_and_a_model_the_default_one(fp4_policy: Policy, engine_model: Path) -> None:
    policy = open_subject(fp4_policy.path)
    assert policy.name == "tiny@1"
    assert open_subject(engine_model).recipe == Recipe()
    chosen = replace(Recipe(), kv="bf16")
    assert open_subject(engine_model, chosen).sites(mid=True) == ("experts_in", "experts_mid")
    assert policy.sites(mid=False) == ("experts_in", "k", "v")


def test_what_leaves_no_hints_or_is_no_model_is_refused(engine_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_subject(tmp_path)
    with pytest.raises(ConfigError, match="rounds nothing while serving"):
        open_subject(engine_model, Recipe(experts="w4a16", kv="bf16", k_rotation=0))
    with pytest.raises((PolicyError, ConfigError)):
        open_subject(engine_model, Recipe(expert_layers=(1000,)))
