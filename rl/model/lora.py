"""LoRA: small trained matrices beside the frozen weights of linear layers, W + scale x B x A. They come from peft.

peft adds its modules to our model before it is sharded. We call nothing else of it, since its functions to switch or
merge adapters expect whole tensors, and its layers do not compute what an engine computes (merged_linear.py). Frozen
weights are stored in the dtype of forward passes, and adapters are float32 masters. Importing peft takes seconds, so
only runs with adapters do.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.config.schema import ALL_LINEAR, ConfigError, LoraConfig
from rl.model.adapter_names import ADAPTER, is_adapter
from rl.model.merged_linear import patch_to_merge
from rl.model.shards import LocalSlice, local_slices, named_parameters


@dataclass(frozen=True)
class Adapters:
    """The adapters that a model gets."""

    config: LoraConfig
    seed: int


def inject(model: Any, config: LoraConfig, dtype: str, own_head: str = "") -> None:
    """Add adapters to a model on the meta device, and freeze everything else but `own_head`, a critic's head."""
    import peft  # takes seconds

    targets = _targets(model, config)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,
    )
    peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for layer in _lora_layers(model):
        patch_to_merge(layer)
    model.get_input_embeddings().register_forward_hook(_require_gradient)
    for name, parameter in model.named_parameters():
        is_trained = is_adapter(name) or name == own_head
        parameter.requires_grad_(is_trained)
        if not is_trained:
            parameter.data = parameter.data.to(getattr(torch, dtype))


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Make the input of the first layer need a gradient. Compiled layers would otherwise need a graph for it alone."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def _lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


def _targets(model: Any, config: LoraConfig) -> list[str]:
    """Return the names of the modules that get adapters. They are whole names, so that peft matches nothing else."""
    head = model.get_output_embeddings()
    linear = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    }
    if config.targets == [ALL_LINEAR]:
        if not linear:
            raise ConfigError(
                f"model.lora: {type(model).__name__} has no linear layers besides its head, so there is nothing to add "
                "adapters to; set model.lora.rank=0"
            )
        return list(linear)
    leaves = {name.rpartition(".")[2] for name in linear}
    for target in config.targets:
        if target not in leaves:
            kinds = {type(m).__name__ for name, m in model.named_modules() if name.rpartition(".")[2] == target}
            found = f"a {', '.join(sorted(kinds))}" if kinds else "no module"
            raise ConfigError(
                f"model.lora.targets: got {target}, which is {found} of {type(model).__name__}; adapters fit linear "
                f"layers other than the head: {', '.join(sorted(leaves)) or 'this model has none'}"
            )
    return [name for name in linear if name.rpartition(".")[2] in config.targets]


def initialize(model: nn.Module, adapters: Adapters, mesh: DeviceMesh) -> None:
    """Give adapters their first values: random for A, and 0 for B. So the model is the same as without them.

    A whole matrix is drawn from a seed of its own, and each rank takes its rows. So values depend neither on the number
    of ranks nor on the device.
    """
    axis = mesh.ndim - 1  # one for replicas may precede it
    for part in local_slices(model):
        if ".lora_B." in part.info.name:
            part.data.zero_()
        elif ".lora_A." in part.info.name:
            start, end = part.info.rows(mesh.get_local_rank(axis), mesh.size(axis))
            part.data.copy_(_draw(part.info.name, part.info.shape, adapters.seed)[start:end])


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the first values of A: uniform, with the bound of an nn.Linear of this size, as peft does."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def scale_of(model: nn.Module, weight: str) -> float:
    """Return the factor (alpha / rank) with which the layer of this weight computes its adapters."""
    layer: Any = model.get_submodule(weight.rpartition(".")[0])
    return layer.scaling[ADAPTER]


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def trained_slices(model: nn.Module) -> list[LocalSlice]:
    """Return the slices that a checkpoint holds: those of trained tensors, or of all in a model without adapters."""
    parts = list(local_slices(model))
    if not has_adapters(model):
        return parts
    trained = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
    return [part for part in parts if part.info.name in trained]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute without adapters in this context. peft's own functions would also change which parameters are trained."""
    layers = _lora_layers(model)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class BaseModel(nn.Module):
    """The frozen model inside of one with adapters: the reference policy, without weights of its own."""

    def __init__(self, adapted: nn.Module):
        super().__init__()
        self._adapted = (adapted,)  # in a tuple, so that its parameters are not those of this module

    @property
    def config(self) -> Any:
        return self._adapted[0].config

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with adapters_off(self._adapted[0]):
            return self._adapted[0](*inputs, **options)
