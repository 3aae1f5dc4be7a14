"""An endpoint without a report proves its format by the checkpoint that it serves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.checkpoint import read_checkpoint
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.arms.records import Role
from eval_gate.arms.source import resolve
from eval_gate.preflight import check_arm
from trace_serve.errors import ConfigError
from trace_serve.policy.build import build_policy
from trace_serve.recipe import Recipe


@pytest.fixture(scope="module")
def packed(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model packed in both public layouts."""
    root = tmp_path_factory.mktemp("packed")
    recipe = Recipe()
    return {
        layout: build_policy(engine_model, root / layout, name="tiny", version="1", recipe=recipe, weights=layout).path
        for layout in ("modelopt", "compressed-tensors")
    }


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_packed_experts_are_told_from_their_dtypes(packed: dict[str, Path], layout: str) -> None:
    found = read_checkpoint(packed[layout])
    assert (found.expert_layers, found.expert_layers_fp4, found.layers_total) == (4, 4, 4)
    assert found.quantization is not None
    evidence = ArmEvidence(source="http://a", checkpoint=found.model_copy(update={"served_root": f"/models/{layout}"}))
    assert check_arm(Role.SERVING, evidence) == []
    assert "is quantized" in check_arm(Role.TRAINING, evidence)[0].message


def test_bf16_is_proof_for_the_training_arm_alone(engine_model: Path) -> None:
    found = read_checkpoint(engine_model)
    assert (found.expert_layers, found.expert_layers_fp4, found.quantization) == (4, 0, None)
    evidence = ArmEvidence(source="http://a", checkpoint=found.model_copy(update={"served_root": engine_model.name}))
    assert check_arm(Role.TRAINING, evidence) == []
    assert "packed FP4 experts in 0 of 4 layers" in check_arm(Role.SERVING, evidence)[0].message


def test_an_endpoint_that_serves_something_else_stays_unproven(packed: dict[str, Path]) -> None:
    found = read_checkpoint(packed["modelopt"])
    for root in (None, "/models/other"):
        evidence = ArmEvidence(source="http://a", checkpoint=found.model_copy(update={"served_root": root}))
        assert "expected the checkpoint 'modelopt'" in check_arm(Role.SERVING, evidence)[0].message
    bare = check_arm(Role.SERVING, ArmEvidence(source="http://a"))
    assert "--serving-checkpoint" in bare[0].message


async def test_what_is_served_is_asked_of_the_endpoint(
    start_server: Callable[[], Any], packed: dict[str, Path]
) -> None:
    server = start_server()
    server.models = [{"id": "other", "root": "/x"}, {"id": "tiny", "root": "/models/modelopt"}]
    source = resolve(Role.SERVING, server.url, Endpoint(server.url, model="tiny"), packed["modelopt"])
    assert source.evidence.artifact_digest is None
    async with source.open(1.0, Path("unused")) as arm:
        assert (arm.model, arm.root) == ("tiny", "/models/modelopt")
    with pytest.raises(ConfigError, match="one named 'nobody'"):
        async with HttpArm(Endpoint(server.url, model="nobody"), ask_root=True):
            pass


def test_damaged_and_misplaced_checkpoints_are_refused(packed: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors files"):
        read_checkpoint(tmp_path)
    directory = tmp_path / "copy"
    shutil.copytree(packed["modelopt"], directory)
    file = next(directory.glob("*.safetensors"))
    raw = file.read_bytes()
    for damaged in (b"", raw[:4], b"\xff" * 8 + raw[8:], raw[:8] + b"[" + raw[9:]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged"):
            read_checkpoint(directory)
    with pytest.raises(ConfigError, match="--training-checkpoint: belongs to a URL"):
        resolve(Role.TRAINING, str(directory), Endpoint(url=""), directory)
