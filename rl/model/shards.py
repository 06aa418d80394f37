"""The shards of a model: which rank of a mesh holds which rows of each tensor.

Loading, weight sync, checkpoints and merging all use this map. Every rank can derive it from the list of tensors,
because FSDP2 cuts the first dimension into chunks of ceil(n / ranks) rows. The last ranks may hold fewer rows or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl.model.adapter_names import plain_name


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the whole model, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # float32, bfloat16, ...
    sharded: bool  # if False, every rank of the mesh holds the whole tensor
    is_merged: bool = False  # whether a weight sync adds LoRA adapters to it

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.torch_dtype.itemsize

    def rows(self, index: int, num_ranks: int) -> tuple[int, int]:
        """Return the [start, end) rows that rank `index` of the mesh owns. Rank 0 owns replicated tensors."""
        num_rows = self.shape[0] if self.shape else 1
        if not self.sharded:
            return (0, num_rows) if index == 0 else (num_rows, num_rows)
        chunk = -(-num_rows // num_ranks)
        return min(index * chunk, num_rows), min((index + 1) * chunk, num_rows)

    def span(self, index: int, num_ranks: int) -> tuple[int, int]:
        """Return the first element of these rows, and their number of elements."""
        start, end = self.rows(index, num_ranks)
        row_elements = torch.Size(self.shape[1:]).numel()
        return start * row_elements, (end - start) * row_elements


@dataclass(frozen=True)
class LocalSlice:
    """This rank's rows of a tensor. `data` is a view of the model's own memory."""

    info: TensorInfo
    data: Tensor


def local_slices(model: nn.Module) -> Iterator[LocalSlice]:
    """Yield this rank's part of every parameter and persistent buffer in model order. Tied parameters come once."""
    reshard(model)
    for name, tensor in _named_tensors(model):
        local, is_sharded = tensor, False
        if isinstance(tensor, DTensor):
            placement = tensor.placements[-1]  # the last mesh axis is for shards; one for replicas may precede it
            assert placement.is_shard(dim=0) or placement.is_replicate(), f"{name} is cut along {placement}"
            local, is_sharded = tensor.to_local(), placement.is_shard()
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield LocalSlice(TensorInfo(name, tuple(tensor.shape), dtype, is_sharded), local.detach())


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of the root module. They still exist after a forward pass without a backward pass.
    Meanwhile `local_slices` would return them instead of the shards, and the next forward pass would use them although
    the shards may have changed."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gather_rows(rows: Tensor, parameter: nn.Parameter, device: torch.device) -> Tensor:
    """Return the whole tensor of which each rank holds `rows`. They are cut as the parameter is, and may be in host
    memory. This is a collective of the ranks that share the parameter."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    sharded = DTensor.from_local(rows.to(device), mesh, placements, run_check=False, shape=shape, stride=stride)
    return sharded.full_tensor()


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under their names in files, which differ from those in a module with LoRA adapters."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from named_parameters(model)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield plain_name(name), buffer
