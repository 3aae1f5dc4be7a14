"""The verl engine with hints attaches before sharding and gives each packed micro-batch its files.

verl's engine needs a GPU, so one with its methods and its packed batches stands in for it; that the methods are those
is what `test_plug_contracts` checks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from plug_rollouts import RECIPE, rollout, tokens_of

from trace_serve.errors import ConfigError
from trace_serve.guided.plugs.verl import hinted_engine
from trace_serve.hints import wire

LENGTHS = {1: 12, 2: 9}


class Engine:
    """Packs two sequences and four tokens of static padding into one row."""

    def __init__(self, *, forward_only: bool = False, qat: bool = False, ulysses: bool = False) -> None:
        self.engine_config = SimpleNamespace(forward_only=forward_only, qat=SimpleNamespace(enable=qat))
        self.use_ulysses_sp = ulysses

    def _build_fsdp_module(self, module: Any) -> Any:
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        ids = [tokens_of(seed, length)[0] for seed, length in LENGTHS.items()]
        positions = [torch.arange(length) for length in (*LENGTHS.values(), 4)]
        packed = torch.cat([*ids, torch.zeros(4, dtype=torch.int64)]).unsqueeze(0)
        inputs = {"input_ids": packed, "attention_mask": None, "position_ids": torch.cat(positions).unsqueeze(0)}
        return inputs, {"pad_size": 4}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products this small only lose time to threads that wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tensors = "verl.workers.engine.fsdp.transformer_impl", "verl.utils.tensordict_utils"
    modules = {name: ModuleType(name) for name in (engine, tensors)}
    modules[engine].__dict__["FSDPEngineWithLMHead"] = Engine
    modules[tensors].__dict__["get"] = lambda batch, key, default=None: batch.get(key, default)
    for name in modules:
        parts = name.split(".")
        for count in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, Any]:
    wire.write(tmp_path / "1.safetensors", rollout(1, LENGTHS[1]))
    return {"rollout_hints": [str(tmp_path / "1.safetensors"), None]}


def test_a_packed_micro_batch_trains_on_its_hints(engine_model: Path, batch: dict[str, Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = hinted_engine(RECIPE)()
    assert engine._build_fsdp_module(model) is model
    inputs, others = engine.prepare_model_inputs(batch)
    assert others == {"pad_size": 4}
    assert [each is None for each in inputs["rollout_hints"]] == [False, True, True]
    logits = model(**inputs, use_cache=False).logits
    without = model(**{**inputs, "rollout_hints": [None] * 3}, use_cache=False).logits
    assert not torch.equal(logits[0, :11], without[0, :11])
    assert torch.equal(logits[0, 12:21], without[0, 12:21])
    logits[0, :12].float().logsumexp(-1).sum().backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.any()


def test_what_hints_cannot_follow_is_refused(batch: dict[str, Any]) -> None:
    engine = hinted_engine(RECIPE)
    with pytest.raises(ConfigError, match="qat"):
        engine(qat=True)._build_fsdp_module(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="ulysses"):
        engine(ulysses=True).prepare_model_inputs(batch)
    with pytest.raises(ConfigError, match="rollout_hints: not in the batch"):
        engine().prepare_model_inputs({})


def test_an_engine_that_only_scores_stays_as_it_is() -> None:
    engine = hinted_engine(RECIPE)(forward_only=True)
    module = torch.nn.Linear(2, 2)
    assert engine._build_fsdp_module(module) is module
    assert "rollout_hints" not in engine.prepare_model_inputs({})[0]
