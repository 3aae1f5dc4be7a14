"""The KV pool of a hybrid model has fewer layers than the model; recipes go by the model's indices."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trace_serve import nvfp4
from trace_serve.engine import rows, spec, state
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import EngineError
from trace_serve.hints.options import HintOptions
from trace_serve.hints.slots import SlotPasses
from trace_serve.recipe import Recipe

with warnings.catch_warnings():
    # SGLang names the quantization formats that it has no kernels for here, as warnings, when it is imported.
    warnings.simplefilter("ignore")
    from trace_serve.engine import kv

SLOTS, HEADS, DIM = 6, 2, 32
SCALES = (1.0, 1.0, 1.0, 1.0, 1.0, 8.0)
RECIPE = Recipe(kv_layers=(3, 5), kv_global_scale="static", k_global_scale=SCALES, v_global_scale=SCALES)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> state.EngineState:
    Telemetry(tmp_path, create=True)
    monkeypatch.setattr(state, "_state", None)
    return state.create(spec.EngineSpec(recipe=RECIPE, run_dir=str(tmp_path)))


@pytest.fixture
def method(engine: state.EngineState) -> kv.TraceNvFp4KVMethod:
    method = kv.TraceNvFp4KVMethod((1, 3, 5))
    method.create_buffers(SLOTS, HEADS, DIM, 3, "cpu")
    return method


def test_formats_follow_the_models_layers(method: kv.TraceNvFp4KVMethod) -> None:
    assert [layer.k_scales is not None for layer in method.layers] == [False, True, True]
    packed, plain = DIM // 2 + DIM // 16, 2 * DIM
    assert method.bytes_per_token() == 2 * HEADS * (2 * packed + plain)
    assert method.compute_cell_size(HEADS, DIM, 3, 2) == method.bytes_per_token()


def test_global_scales_follow_the_models_layers(method: kv.TraceNvFp4KVMethod) -> None:
    values = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.tensor([4, 1])
    for index, layer_id in enumerate(method.layer_ids):
        layer = method.layers[index]
        method.quantize_and_store(layer.k, layer.v, layer.k_scales, layer.v_scales, slots, values, values)
        scales = torch.empty(0) if layer.v_scales is None else layer.v_scales
        found = method.dequantize_kv_tensor(layer.v, scales, index)[slots]
        if layer_id == 1:
            assert torch.equal(found, values)
            continue
        quantized = nvfp4.quantize(values.reshape(-1, DIM), SCALES[layer_id], RECIPE, operand="kv")
        assert layer.v_scales is not None
        assert torch.equal(layer.v[slots].view(-1, DIM // 2), quantized.codes)
        assert torch.equal(layer.v_scales[slots].view(-1, DIM // 16), quantized.scales)
        torch.testing.assert_close(found.float(), values.float(), atol=0.6, rtol=0.15)


def test_hints_name_the_models_layers(engine: state.EngineState, method: kv.TraceNvFp4KVMethod) -> None:
    engine.layers = 6
    engine.passes = SlotPasses(SLOTS)
    hybrid_pool = SimpleNamespace(full_kv_pool=SimpleNamespace(quant_method=method))
    cases: tuple[tuple[str | tuple[int, ...], tuple[int, ...]], ...] = (
        ("all", (3, 5)),
        ("deeper-half", (3, 5)),
        ((5,), (5,)),
        ((0, 1, 2, 4), ()),
    )
    for chosen, expected in cases:
        options = HintOptions(sites=("k", "v"), layers=chosen)
        sites = rows.read(hybrid_pool, torch.tensor([0, 3]), options).sites
        assert [site.layers for site in sites] == ([expected] * 2 if expected else [])


def test_a_pool_of_another_size_than_the_models_attention_is_refused(engine: state.EngineState) -> None:
    with pytest.raises(EngineError, match=r"has 2 layers, expected 3: \(1, 3, 5\)"):
        kv.TraceNvFp4KVMethod((1, 3, 5)).create_buffers(SLOTS, HEADS, DIM, 2, "cpu")


def test_a_pool_that_is_not_ours_has_no_method() -> None:
    assert kv.method_of(SimpleNamespace(k_buffer=[])) is None
    assert kv.method_of(SimpleNamespace(full_kv_pool=SimpleNamespace(quant_method=object()))) is None
