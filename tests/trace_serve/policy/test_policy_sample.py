import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import save_file

from trace_serve.errors import PolicyError
from trace_serve.policy import sample


def dense_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (10, 16),
        "model.norm.weight": (16,),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (32, 16),
        "model.layers.0.mlp.up_proj.weight": (32, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 32),
        "model.layers.0.post_attention_layernorm.weight": (16,),
    }
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def test_names_follow_the_mixtral_checkpoint_layout():
    tensors = sample._upcycle(dense_weights(), seed=0, experts=3, noise=0.1)
    experts = {f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight" for e in range(3) for w in ("w1", "w2", "w3")}
    kept = {name for name in dense_weights() if ".mlp." not in name}
    assert set(tensors) == experts | kept | {"model.layers.0.block_sparse_moe.gate.weight", "lm_head.weight"}
    assert tensors["model.layers.0.block_sparse_moe.gate.weight"].shape == (3, 16)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())


def test_experts_differ_by_the_relative_noise():
    dense = dense_weights()
    tensors = sample._upcycle(dense, seed=0, experts=2, noise=0.1)
    source = dense["model.layers.0.mlp.gate_proj.weight"].float()
    first, second = (tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"].float() for e in range(2))
    assert not torch.equal(first, second)
    assert ((first - source).std() / source.std()).item() == pytest.approx(0.1, rel=0.2)


def test_the_seed_decides_every_weight():
    first, again, other = (sample._upcycle(dense_weights(), seed=s, experts=2, noise=0.1) for s in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert not torch.equal(first[gate], other[gate])


def test_a_finished_model_is_returned_and_another_one_is_refused(tmp_path: Path):
    out = tmp_path / "sample"
    out.mkdir()
    source = sample._source_directory() / sample.GGUF_FILE
    info = {"schema_version": 1, "source": sample.digest_file(source), "seed": 0, "experts": 4, "noise": 0.1}
    (out / "sample.json").write_text(json.dumps(info))
    save_file({}, out / "model.safetensors")
    said: list[str] = []
    assert sample.build_sample_model(out, progress=said.append) == out
    assert said == [f"{out} is already built"]
    with pytest.raises(PolicyError, match="not the sample model with these arguments"):
        sample.build_sample_model(out, seed=1)


@pytest.mark.parametrize(("arguments", "field"), [({"experts": 1}, "experts"), ({"noise": 2.0}, "noise")])
def test_arguments_out_of_range_are_refused(tmp_path: Path, arguments, field):
    with pytest.raises(PolicyError) as caught:
        sample.build_sample_model(tmp_path / "sample", **arguments)
    assert caught.value.field == field
    assert list(tmp_path.iterdir()) == []
