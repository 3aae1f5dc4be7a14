"""Which expert weights are rounded when SGLang has loaded them, and which came rounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from trace_serve.engine import expert_images, expert_weights, state
from trace_serve.engine.spec import EngineSpec
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import EngineError
from trace_serve.kernels import kernels_for
from trace_serve.recipe import Recipe

RECIPE = Recipe()
EXPERT = "model.layers.0.block_sparse_moe.experts.0"


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process state of one engine; its tensor parallelism is one rank until a test says otherwise."""
    monkeypatch.setattr(state, "_state", None)
    Telemetry(tmp_path, create=True)
    state.create(EngineSpec(recipe=RECIPE, run_dir=str(tmp_path)))
    with get_parallel().override(moe_tp_size=1):
        yield


def matrices(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}
    out = {name: (torch.randn(*shape, generator=generator) * 0.1).bfloat16() for name, shape in shapes.items()}
    for matrix in out.values():
        # A maximum of 0.4 gives g = 2^-12, and then these blocks the smallest scale, which they lose the second time.
        matrix[0, 0] = 0.4
        matrix[1, :16] = 3.2 * 2.0**-21
    return out


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    kernels = kernels_for(RECIPE, "cpu")
    gate, up = kernels.fake_quantize_weight(torch.cat([weights["w1"], weights["w3"]]), parts=2).chunk(2)
    return {"w1": gate, "w3": up, "w2": kernels.fake_quantize_weight(weights["w2"])}


def load(layer: Any, weights: dict[str, Tensor]) -> None:
    layer.w13_weight.data[0] = torch.cat([weights["w1"], weights["w3"]])
    layer.w2_weight.data[0] = weights["w2"]


def new_layer() -> Any:
    layer: Any = torch.nn.Module()
    layer.layer_id = 0
    layer.w13_weight = torch.nn.Parameter(torch.zeros(1, 64, 64, dtype=torch.bfloat16), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.zeros(1, 64, 32, dtype=torch.bfloat16), requires_grad=False)
    return layer


def held(layer: Any) -> dict[str, Tensor]:
    gate, up = layer.w13_weight[0].chunk(2)
    return {"w1": gate, "w3": up, "w2": layer.w2_weight[0]}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def remember(images: dict[str, Tensor]) -> None:
    for name, image in images.items():
        expert_images.remember(f"{EXPERT}.{name}", image)


@pytest.mark.usefixtures("ranks")
def test_an_image_of_a_packed_checkpoint_is_kept_as_it_is() -> None:
    images = rounded(matrices(0))
    assert not equal(rounded(images), images), "rounding must not be idempotent here, or the test shows nothing"
    layer = new_layer()
    expert_images.begin("modelopt")
    remember(images)
    load(layer, images)
    for _ in range(2):
        expert_weights.quantize(layer)
        assert equal(held(layer), images)
    assert expert_images.checkpoint_format() == "modelopt"


@pytest.mark.usefixtures("ranks")
def test_bf16_weights_that_look_like_the_image_before_are_rounded_as_at_a_fresh_start() -> None:
    images = rounded(matrices(0))
    layer = new_layer()
    expert_images.begin("modelopt")
    remember(images)
    load(layer, images)
    expert_weights.quantize(layer)
    expert_images.begin("bf16")
    load(layer, images)
    expert_weights.quantize(layer)
    assert equal(held(layer), rounded(images))


@pytest.mark.usefixtures("ranks")
def test_bf16_weights_are_rounded_once_however_often_sglang_asks() -> None:
    weights = matrices(1)
    layer = new_layer()
    expert_images.begin("bf16")
    load(layer, weights)
    for _ in range(2):
        expert_weights.quantize(layer)
        assert equal(held(layer), rounded(weights))


@pytest.mark.usefixtures("ranks")
def test_a_packed_gate_beside_a_bf16_up_projection_is_refused() -> None:
    images, weights = rounded(matrices(0)), matrices(2)
    layer = new_layer()
    expert_images.begin("modelopt")
    remember(images)
    load(layer, {**images, "w3": weights["w3"]})
    with pytest.raises(EngineError, match="gate and up"):
        expert_weights.quantize(layer)


@pytest.mark.usefixtures("ranks")
def test_the_slices_of_every_tensor_parallel_rank_are_known() -> None:
    images = rounded(matrices(3))
    with get_parallel().override(moe_tp_size=2):
        expert_images.begin("modelopt")
        remember(images)
        for rank in range(2):
            for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
                part = images[name].chunk(2, dim=dim)[rank]
                assert expert_images.holds(expert_images.fingerprint(part))
        assert not expert_images.holds(expert_images.fingerprint(images["w2"].chunk(2, dim=0)[0]))
