"""What may be named as an arm, and under which identity its answers are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role, cache_key
from eval_gate.arms.source import resolve
from trace_serve.errors import ConfigError, PolicyError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_plain_model_is_a_bf16_training_arm_with_its_digest(model: Path) -> None:
    source = resolve(Role.TRAINING, str(model), Endpoint(url=""))
    assert source.recipe is None
    assert source.evidence.artifact_digest is not None
    assert source.evidence.base_digest == source.evidence.artifact_digest
    before = source.evidence.artifact_digest
    (model / "config.json").write_text("{ }")
    assert resolve(Role.TRAINING, str(model), Endpoint(url="")).evidence.artifact_digest != before


def test_only_a_policy_can_be_the_serving_arm(model: Path) -> None:
    with pytest.raises(PolicyError, match=r"no policy\.json there"):
        resolve(Role.SERVING, str(model), Endpoint(url=""))


def test_a_path_that_is_nothing_is_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match="--training") as caught:
        resolve(Role.TRAINING, "no/such/place", Endpoint(url=""))
    assert caught.value.field == "training"


def test_the_cache_key_tells_artifact_role_recipe_request_and_repeat_apart_but_not_names() -> None:
    base = {
        "artifact": "sha256:a",
        "role": Role.TRAINING,
        "recipe_id": None,
        "request": {"model": "m", "n": 1},
        "sample": 0,
    }
    changes = [
        {"artifact": "sha256:b"},
        {"role": Role.SERVING},
        {"recipe_id": "sha256:r"},
        {"request": {"model": "m", "n": 2}},
        {"sample": 1},
    ]
    keys = {cache_key(**(base | change)) for change in [{}, *changes]}  # type: ignore[arg-type]
    assert len(keys) == 6
    assert cache_key(**(base | {"request": {"model": "other", "n": 1}})) in keys  # type: ignore[arg-type]
