"""SGLang's own NVFP4 methods find every tensor of a packed policy, with the dtype and shape they expect."""

from __future__ import annotations

from typing import Any

import pytest
from expert_model import write_expert_model
from packed_policies import build
from sglang_process import FUSED, run_sglang

from trace_serve.recipe import Recipe

LAYOUTS = ("modelopt", "compressed-tensors")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("sglang")
    source = write_expert_model(root / "model", "qwen3_moe")
    return run_sglang(*(build(source, root / layout, Recipe(expert_layers=(1,)), layout) for layout in LAYOUTS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_of_an_expert_has_the_parameter_it_is_loaded_into(seen: dict[str, Any], layout: str) -> None:
    parameters, stored = seen[layout]["parameters"], seen[layout]["stored"]
    assert len(stored) == 3 * 4
    for key, (dtype, shape) in stored.items():
        name, shard = key.split()
        wanted, whole = parameters[name]
        assert dtype == wanted
        one = whole[1:]
        if len(shape) == 2:
            # gate and up are halves of one parameter.
            assert shape == ([one[0] // 2, one[1]] if shard != "w2" else one)
        else:
            assert shape in ([], [1])
            assert one == ([2] if shard != "w2" else [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_parameter_is_left_without_a_tensor(seen: dict[str, Any], layout: str) -> None:
    loaded = {key.split()[0] for key in seen[layout]["stored"]}
    # Swizzled copies are made from the scales after loading.
    assert {name for name in seen[layout]["parameters"] if "swizzled" not in name} == loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_config_is_taken_for_packed_nvfp4_and_leaves_the_rest_out(seen: dict[str, Any], layout: str) -> None:
    assert seen[layout]["serialized"]
    assert seen[layout]["left_out"] == list(FUSED[:-1])
