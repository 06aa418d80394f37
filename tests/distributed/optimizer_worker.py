"""Run for tests/distributed/test_optimizers.py: some steps of each optimizer on 4 ranks, with given gradients."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from rl.config.schema import ActorConfig
from rl.learner.optimizers import ModelOptimizer, build_optimizer
from tests.forked_ranks import run_worlds

NUM_STEPS, LR = 3, 0.01
CPU = torch.device("cpu")


class Model(nn.Module):
    """An embedding, a layer and a head. Rows of 64 elements make blocks of 8-bit AdamW, those of 96 do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 64)  # its rows divide by no number of ranks
        self.layer = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
        self.head = nn.Linear(64, 1)  # fewer rows than ranks


def seeded(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Return a tensor for every parameter: its weights for step 0, then its gradients."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(each.shape, generator=generator) for name, each in model.named_parameters()}


def fill(model: nn.Module) -> None:
    for name, value in seeded(model, 0).items():
        model.get_parameter(name).data.copy_(value)


def take_steps(model: nn.Module, optimizer: ModelOptimizer, mesh: DeviceMesh) -> None:
    for step in range(1, NUM_STEPS + 1):
        for name, value in seeded(model, step).items():
            parameter: Any = model.get_parameter(name)
            parameter.grad = distribute_tensor(value, mesh, parameter.placements)
        optimizer.step(LR)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


def meshes() -> dict[str, DeviceMesh]:
    """Return the meshes of 4 ranks by name. All ranks make all of them, in the same order."""
    groups = {str(size): dist.new_group(list(range(size))) for size in (1, 3, 4)}
    found = {"2x2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))}
    for name, group in groups.items():
        if dist.get_rank() < int(name):
            found[name] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    return found


def work(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    for label, mesh in meshes().items():
        for name in names:
            model = Model()
            fill(model)
            fully_shard(model.layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            config = ActorConfig(optimizer=name, weight_decay=0.1)
            optimizer = build_optimizer(model, set(model.layer.parameters()), config, CPU)
            take_steps(model, optimizer, mesh)
            whole = {of: each.detach().full_tensor() for of, each in model.named_parameters()}
            if dist.get_rank() == 0:
                save_file(whole, folder / f"{name}.{label}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # torchao compiles its step, for minutes on a CPU. tests/e2e/test_settings.py lets it.
    torch.compile = lambda function, **options: function
    run_worlds([(4, lambda: work(Path(sys.argv[1]), json.loads(sys.argv[2])))])
