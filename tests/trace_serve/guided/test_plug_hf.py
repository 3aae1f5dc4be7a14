"""A transformers model in training follows its rollouts: beside the evaluated model, in flight, sharded, stepped."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plug_fsdp_worker
import pytest
import torch
import transformers
from plug_rollouts import RECIPE, rollout, tokens_of
from safetensors.torch import load_file
from torch import Tensor

from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.guided.plugs.hf import HintedModel, checkpoint_tensors
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.recipe import Recipe


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products this small only lose time to threads that wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(engine_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.bfloat16).eval()


@pytest.fixture
def model(plain: Any) -> Any:
    return copy.deepcopy(plain).train()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def loss(model: Any, seed: int, tokens: int, hints: Any = None) -> Tensor:
    ids = tokens_of(seed, tokens)
    found: Tensor = model(ids, labels=ids, use_cache=False, rollout_hints=hints or [rollout(seed, tokens)]).loss
    return found


@pytest.mark.parametrize("recipe", [RECIPE, Recipe(expert_rotation=16, k_rotation=16)], ids=["default", "rotated"])
def test_without_hints_it_computes_the_training_time_version(plain: Any, model: Any, recipe: Recipe) -> None:
    reference = copy.deepcopy(plain)
    fake_quantize(reference, recipe)
    HintedModel(model, recipe, replay_routes=False)
    ids = tokens_of(1, 20)
    with torch.inference_mode():
        expected = reference(ids, use_cache=False).logits
        assert torch.equal(model(ids, rollout_hints=[None], use_cache=False).logits, expected)
        assert torch.equal(model.eval()(ids, use_cache=False).logits, expected)
        assert not torch.equal(plain(ids, use_cache=False).logits, expected)


def test_with_hints_it_computes_what_guided_rounding_and_routing_do(plain: Any, model: Any) -> None:
    hints = [rollout(1, 20), rollout(2, 20)]
    ids = torch.cat([tokens_of(1, 20), tokens_of(2, 20)])
    reference = copy.deepcopy(plain)
    fake_quantize(reference, RECIPE, HintedRounding(RECIPE, hints))
    HintedModel(model, RECIPE)
    with torch.inference_mode():
        found = model(ids, rollout_hints=hints, use_cache=False).logits
        swapped = model(ids, rollout_hints=[None, hints[1]], use_cache=False).logits
        with RoutingReplay(reference, hints):
            assert torch.equal(found, reference(ids, use_cache=False).logits)
    assert not torch.equal(found[0], swapped[0])
    assert torch.equal(found[1], swapped[1])


def test_left_padding_moves_the_hints_with_the_tokens(model: Any) -> None:
    HintedModel(model, RECIPE)
    hints = [rollout(1, 20)]
    padded, mask = torch.zeros(1, 25, dtype=torch.int64), torch.zeros(1, 25, dtype=torch.int64)
    padded[:, 5:], mask[:, 5:] = tokens_of(1, 20), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    named = {"input_ids": padded, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    with torch.inference_mode():
        alone = model(tokens_of(1, 20), rollout_hints=hints, use_cache=False).logits[0].float()
        beside = model(**named, rollout_hints=hints).logits[0, 5:].float()
        nearest = model(**named, rollout_hints=[None]).logits[0, 5:].float()
    assert (beside - alone).abs().mean() < 0.2 * (nearest - alone).abs().mean()


def test_micro_batches_in_flight_keep_their_own_hints_under_checkpointing(model: Any) -> None:
    other = copy.deepcopy(model)
    HintedModel(model, RECIPE)
    for seed, tokens in ((1, 20), (2, 13)):
        loss(model, seed, tokens).backward()
    hinted = HintedModel(other, RECIPE)
    other.gradient_checkpointing_enable(hinted.checkpointing())
    first, second = loss(other, 1, 20), loss(other, 2, 13)
    first.backward()
    second.backward()
    assert any("experts.gate_up_proj" in name for name in gradients(model))
    assert same(gradients(other), gradients(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_would_lose_the_hints_is_refused(model: Any, reentrant: bool) -> None:
    HintedModel(model, RECIPE)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = loss(model, 1, 12)
    with pytest.raises(ConfigError, match="checkpointing"):
        found.backward()


def test_an_optimizer_step_moves_the_trainers_own_weights_and_the_next_pass_rounds_them(plain: Any, model: Any) -> None:
    HintedModel(model, RECIPE)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start = loss(model, 1, 20)
    start.backward()
    optimizer.step()
    moved = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert any("experts.down_proj" in name for name in moved)
    assert loss(model, 1, 20) < start
    stepped = copy.deepcopy(plain)
    stepped.load_state_dict(model.state_dict())
    fake_quantize(stepped, RECIPE)
    ids = tokens_of(1, 20)
    with torch.inference_mode():
        own = model(ids, rollout_hints=[None], use_cache=False).logits
        assert torch.equal(own, stepped(ids, use_cache=False).logits)


def test_the_trainer_of_transformers_carries_hints_in_its_batches(model: Any, tmp_path: Path) -> None:
    HintedModel(model, RECIPE)
    data = [{"input_ids": tokens_of(seed, 12)[0], "rollout_hints": rollout(seed, 12)} for seed in (1, 2)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids, "rollout_hints": [row["rollout_hints"] for row in rows]}

    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, remove_unused_columns=False, **options
    )
    before = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    assert trainer.train().training_loss > 0
    assert not torch.equal(model.model.layers[0].mlp.experts.down_proj, before)


def test_ranks_that_share_a_model_average_the_gradients_of_their_own_hints(
    plain: Any, engine_model: Path, tmp_path: Path
) -> None:
    store, out, log = tmp_path / "store", tmp_path / "rank0.pt", tmp_path / "log"
    command = [sys.executable, plug_fsdp_worker.__file__, str(engine_model), str(store), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("w") as file:
        ranks = [
            subprocess.Popen([*command, str(rank), "2"], env=environment, stdout=file, stderr=file) for rank in range(2)
        ]
        try:
            assert [rank.wait(timeout=300) for rank in ranks] == [0, 0], log.read_text()
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    alone = []
    for seed, tokens in plug_fsdp_worker.SEQUENCES:
        model = copy.deepcopy(plain).train()
        HintedModel(model, RECIPE)
        loss(model, seed, tokens).backward()
        alone.append(gradients(model))
    found = torch.load(out)
    assert found["gradients"].keys() == alone[0].keys() | alone[1].keys()
    for name, gradient in found["gradients"].items():
        parts = [each.get(name, torch.zeros_like(gradient)).float() for each in alone]
        torch.testing.assert_close(gradient.float(), sum(parts) / 2, rtol=0.02, atol=1e-5)
    assert same(found["checkpoint"], load_file(engine_model / "model.safetensors"))


def test_the_weights_to_push_have_the_names_and_values_of_the_checkpoint(model: Any, engine_model: Path) -> None:
    HintedModel(model, RECIPE)
    assert same(checkpoint_tensors(model), load_file(engine_model / "model.safetensors"))


def test_what_cannot_be_followed_is_refused(plain: Any, model: Any) -> None:
    HintedModel(model, RECIPE)
    ids = tokens_of(1, 12)
    with pytest.raises(ConfigError, match="missing in training mode"):
        model(ids)
    with pytest.raises(HintFormatError, match="position 0"):
        model(ids, rollout_hints=[rollout(2, 12)])
    with pytest.raises(ConfigError, match="no routed experts"):
        model(ids, rollout_hints=[rollout(1, 12, routes=False)])
    with pytest.raises(ConfigError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 12, 64, dtype=torch.bfloat16), rollout_hints=[None])
    other = copy.deepcopy(plain)
    HintedModel(other, Recipe(k_rotation=16))
    with pytest.raises(HintFormatError, match="recipe_id"):
        other(ids, rollout_hints=[rollout(1, 12)])
    with pytest.raises(ConfigError, match="experts"):
        HintedModel(torch.nn.Linear(2, 2), RECIPE)


def test_hints_may_be_given_around_a_call(model: Any) -> None:
    hinted = HintedModel(model, RECIPE)
    ids = tokens_of(1, 12)
    with torch.inference_mode():
        expected = model(ids, rollout_hints=[rollout(1, 12)], use_cache=False).logits
        with hinted.micro_batch([rollout(1, 12)]):
            assert torch.equal(model(ids, use_cache=False).logits, expected)
