"""One rank of a training step of the tiny Mixtral under FSDP2 on gloo; rank 0 saves the gradients and the checkpoint.

python plug_fsdp_worker.py MODEL STORE OUT RANK RANKS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from plug_rollouts import RECIPE, rollout, tokens_of
from torch.distributed.fsdp import fully_shard

from trace_serve.guided.plugs.hf import HintedModel, checkpoint_tensors

SEQUENCES = ((1, 20), (2, 13))
"""(seed, tokens) of each rank."""


def main(model_path: str, store: str, out: str, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).train()
    hinted = HintedModel(model, RECIPE)
    model.gradient_checkpointing_enable(hinted.checkpointing())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seed, tokens = SEQUENCES[rank]
    ids = tokens_of(seed, tokens)
    model(ids, labels=ids, use_cache=False, rollout_hints=[rollout(seed, tokens)]).loss.backward()
    gradients = {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}
    checkpoint = checkpoint_tensors(model)
    if rank == 0:
        torch.save({"gradients": gradients, "checkpoint": checkpoint}, Path(out))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
