"""What an actor sends: its rows of each tensor. Rows of a weight with LoRA adapters are merged with them.

    rows of W [rows, in]  +  scale x rows of B [rows, rank] @ A [rank, in]      in float32, then cast

W and B are cut into the same rows. So an actor needs no more than the whole A, which is small and is gathered before
the first bucket. Merged rows are computed whenever they are read: once to be sent, and once for their digests. So no
merged copy of the model exists, and the digests do not depend on what was packed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl.model.adapter_names import adapters_of
from rl.model.lora import scale_of
from rl.model.shards import LocalSlice, TensorInfo, gather_rows, named_parameters
from rl.watch.heart import HEART


@dataclass(frozen=True)
class WeightSource:
    """The policy of an actor. `slices` returns its weights, which are in host memory while they are offloaded."""

    model: nn.Module
    slices: Callable[[], Iterable[LocalSlice]]


@dataclass(frozen=True)
class Adapter:
    """The adapters of one weight, as an actor needs them to merge its own rows."""

    whole_a: Tensor  # [rank, in], on the device
    rows_b: Tensor  # [rows, rank]
    scale: float


class MergedSources(Mapping[int, Tensor]):
    """An actor's flat rows by tensor index. Rows with an adapter are computed at each access, in the transfer dtype."""

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        rows: Mapping[int, Tensor],
        adapters: Mapping[int, Adapter],
        device: torch.device,
    ):
        self._tensors, self._rows, self._adapters, self._device = tensors, rows, adapters, device

    def __getitem__(self, index: int) -> Tensor:
        rows, adapter = self._rows[index], self._adapters.get(index)
        if adapter is None:
            return rows.reshape(-1)
        merged = rows.to(self._device, torch.float32, copy=True)
        merged.addmm_(adapter.rows_b.to(self._device), adapter.whole_a, alpha=adapter.scale)
        return merged.to(self._tensors[index].torch_dtype).reshape(-1)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@torch.no_grad()
def open_sources(source: WeightSource, tensors: Sequence[TensorInfo], device: torch.device) -> Mapping[int, Tensor]:
    """Return an actor's flat rows by tensor index. With adapters, this is a collective of the actors."""
    slices = {part.info.name: part.data for part in source.slices()}
    rows = {index: slices[info.name] for index, info in enumerate(tensors)}
    if not any(info.is_merged for info in tensors):
        return {index: each.reshape(-1) for index, each in rows.items()}
    parameters, adapters = dict(named_parameters(source.model)), {}
    with HEART.in_collective("actor"):
        for index, info in enumerate(tensors):
            if info.is_merged:
                name_a, name_b = adapters_of(info.name)
                whole_a = gather_rows(slices[name_a], parameters[name_a], device)
                adapters[index] = Adapter(whole_a, slices[name_b], scale_of(source.model, info.name))
    return MergedSources(tensors, rows, adapters, device)
