"""A small sharded policy with LoRA adapters whose merged weights are exact, so that they can be compared bit by bit.

All numbers are multiples of 2^-10 and small. So W + scale x B x A has no rounding in float32, whatever the order of its
sums.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.config.schema import LoraConfig
from rl.model.adapter_names import is_adapter
from rl.model.load import load_model
from rl.model.lora import Adapters
from rl.model.shards import TensorInfo, local_slices

STEP = 2.0**-10


def save_exact(model: Any, folder: Path) -> None:
    """Save a model with its weights rounded to multiples of 2^-10."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter / STEP).round() * STEP)
    model.save_pretrained(folder)


def load_adapted(folder: Path, mesh: DeviceMesh, config: LoraConfig, dtype: str) -> nn.Module:
    """Load a model with adapters on a mesh of CPUs. Its adapters are those of `draw` in round 0."""
    model = load_model(folder, mesh, torch.device("cpu"), dtype, Adapters(config, seed=0))
    fill_adapters(model, mesh, round_number=0)
    return model


@torch.no_grad()
def fill_adapters(model: nn.Module, mesh: DeviceMesh, round_number: int) -> None:
    for part in local_slices(model):
        if is_adapter(part.info.name):
            part.data.copy_(draw(part.info.name, part.info.shape, round_number)[own_rows(part.info, mesh)])


def own_rows(info: TensorInfo, mesh: DeviceMesh) -> slice:
    axis = mesh.ndim - 1  # one for replicas may precede it
    return slice(*info.rows(mesh.get_local_rank(axis), mesh.size(axis)))


def draw(name: str, shape: tuple[int, ...], round_number: int) -> Tensor:
    """Return a whole adapter. It is different in every round, in all of its elements."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {round_number % 2}".encode()))
    signs = 2 * torch.randint(0, 2, shape, generator=generator) - 1
    return signs * 2.0 ** (-2 - round_number % 3)


def merged(info: TensorInfo, files: Mapping[str, Tensor], config: LoraConfig, round_number: int) -> Tensor:
    """Return a whole tensor as engines must hold it, computed in float64 from the files and the drawn adapters."""
    weight = files[info.name].double()
    if info.is_merged:
        module, (num_rows, num_columns) = info.name.removesuffix(".weight"), info.shape
        first = draw(f"{module}.lora_A.weight", (config.rank, num_columns), round_number).double()
        second = draw(f"{module}.lora_B.weight", (num_rows, config.rank), round_number).double()
        weight = weight + config.scale * second @ first
    return weight.float().to(info.torch_dtype)
