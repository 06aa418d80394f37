"""The memory layout of a receiver: which rows and columns of each tensor it holds, and at which addresses.

An engine fuses q, k and v into one parameter, and keeps only a tensor-parallel slice of most tensors. We need no table
of model families: the engine's own loader runs once, and its copies are recorded instead of made. The record is used
twice. A sync copies weights to the recorded places in one call, without the loader. Verification reads the same places
to see what the engine really holds.

    q_proj.weight [rows, columns]  --(rows 0-511, columns 256-511)-->  a view of qkv_proj.weight

A loader that does more than copy (it packs, transposes or quantizes) cannot be traced: `Untraceable` says why. Such a
receiver is filled through its loader (`OpaqueLoader`). It is verified by what it received.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl.model.shards import TensorInfo
from rl.sync.digest import TensorPart, flat_part

Weights = Iterator[tuple[str, Tensor]]
Loader = Callable[[Iterable[tuple[str, Tensor]]], object]


class Untraceable(Exception):
    """The loader does more than copy."""


@dataclass(frozen=True)
class OpaqueLoader:
    """The loader of a receiver that takes whole tensors, under their Hugging Face names."""

    load: Callable[[Weights], None]
    reason: str  # why its memory layout is not known


@dataclass(frozen=True)
class Region:
    """Rows and columns of a tensor. Its element (r, c) has the flat index start + r * row_stride + c in the tensor."""

    start: int
    num_rows: int
    num_columns: int
    row_stride: int

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    def of(self, tensor: Tensor) -> Tensor:
        """Return the [rows, columns] view of this region in a contiguous tensor."""
        offset = tensor.storage_offset() + self.start
        return tensor.as_strided((self.num_rows, self.num_columns), (self.row_stride, 1), offset)


@dataclass(frozen=True)
class Destination:
    """A region of a tensor, and the [rows, columns] view of the receiver's parameter that it is copied to."""

    tensor: int  # index into the list of tensors
    region: Region
    target: Tensor


class MemoryLayout:
    """All destinations of one receiver. `zeros` are views of padding, which no tensor fills."""

    def __init__(
        self, tensors: Sequence[TensorInfo], destinations: Sequence[Destination], zeros: Sequence[Tensor] = ()
    ):
        self._dtypes = [info.torch_dtype for info in tensors]
        self._zeros = list(zeros)
        self._held: list[TensorPart] | None = None  # built once: thousands of views that never change
        self._by_tensor: list[list[Destination]] = [[] for _ in tensors]
        for destination in destinations:
            self._by_tensor[destination.tensor].append(destination)
        wholes = [[Region(0, 1, info.num_elements, 0)] for info in tensors]
        self.is_whole = [regions == whole for regions, whole in zip(self.regions, wholes, strict=True)]

    @property
    def regions(self) -> list[list[Region]]:
        """The regions of each tensor that this receiver takes."""
        return [[destination.region for destination in destinations] for destinations in self._by_tensor]

    def fill(self, whole: Mapping[int, Tensor]) -> None:
        """Copy whole tensors, given by index, into the receiver's memory."""
        destinations = [destination for index in whole for destination in self._by_tensor[index]]
        sources = [destination.region.of(whole[destination.tensor]) for destination in destinations]
        if destinations:  # a bucket may hold nothing for this receiver
            torch._foreach_copy_([destination.target for destination in destinations], sources)

    def fill_zeros(self) -> None:
        for target in self._zeros:
            target.zero_()

    def expected(self, whole: Mapping[int, Tensor]) -> list[TensorPart]:
        """Return, for digests, what the receiver should hold of the tensors that it takes only in part."""
        return [
            _part(destination, destination.region.of(whole[index]), self._dtypes[index])
            for index in whole
            if not self.is_whole[index]
            for destination in self._by_tensor[index]
        ]

    def held(self, part_bounds: Sequence[Sequence[tuple[int, int]]]) -> list[TensorPart]:
        """Return, for digests, what the receiver holds, as views of its memory. `part_bounds` holds the start and the
        number of elements of the parts in which each tensor arrived. Whole tensors are read back in these parts. The
        bounds must be the same at every call."""
        if self._held is None:
            self._held = [
                part
                for index, destinations in enumerate(self._by_tensor)
                for destination in destinations
                for part in self._held_parts(destination, part_bounds[index])
            ]
        return self._held

    def _held_parts(self, destination: Destination, part_bounds: Sequence[tuple[int, int]]) -> list[TensorPart]:
        index, target, dtype = destination.tensor, destination.target, self._dtypes[destination.tensor]
        if self.is_whole[index]:
            return [flat_part(index, target[0, start : start + count], start, dtype) for start, count in part_bounds]
        return [_part(destination, target, dtype)]


def _part(destination: Destination, values: Tensor, dtype: torch.dtype) -> TensorPart:
    return TensorPart(destination.tensor, values, destination.region.start, destination.region.row_stride, dtype)


def uncovered(tensors: Sequence[TensorInfo], regions_by_rank: Sequence[Sequence[Sequence[Region]]]) -> list[str]:
    """Return the names of the parameters whose regions on the ranks of one engine do not add up to the whole tensor.
    Two ranks must take either the same region or regions that do not overlap."""
    names = []
    for index, info in enumerate(tensors):
        if not info.sharded:  # a buffer, which an engine may not need
            continue
        distinct = {region for regions in regions_by_rank for region in regions[index]}
        if sum(region.num_elements for region in distinct) != info.num_elements:
            names.append(info.name)
    return names


def trace(tensors: Sequence[TensorInfo], model: nn.Module, load: Loader, device: torch.device) -> MemoryLayout:
    """Record where `load` puts each tensor in the model. Raise Untraceable if it does more than copy."""
    parameters = dict(model.named_parameters())
    recorder = _Recorder(parameters | dict(model.named_buffers()))

    def weights() -> Weights:
        for index, info in enumerate(tensors):
            source = torch.ones(info.shape, dtype=info.torch_dtype, device=device)  # not zeros, which mark padding
            with recorder.placing(index, source):
                yield info.name, source

    try:
        with recorder, torch.no_grad():
            load(weights())
    except Untraceable:
        raise
    except Exception as error:  # loaders of repacked layers fail in many ways
        raise Untraceable(f"its loader cannot be watched ({type(error).__name__}: {error})") from error
    _check_filled(parameters, recorder)
    return MemoryLayout(tensors, recorder.destinations, recorder.zeros)


class _Recorder(TorchDispatchMode):
    """Records copies into parameters instead of making them."""

    def __init__(self, memory: Mapping[str, Tensor]):
        super().__init__()
        self.destinations: list[Destination] = []
        self.zeros: list[Tensor] = []
        self._names = {_storage(tensor): name for name, tensor in memory.items() if tensor.numel()}
        self._dtypes = {_storage(tensor): tensor.dtype for tensor in memory.values()}
        self._index, self._source = -1, torch.empty(0)

    @contextmanager
    def placing(self, index: int, source: Tensor) -> Iterator[None]:
        self._index, self._source = index, source
        yield
        self._source = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _written_tensors(func, args, kwargs or {})
        if any(_storage(tensor) == _storage(self._source) for tensor in written):
            raise Untraceable(f"its loader calls {func} on what it was given")
        names = [self._names[_storage(tensor)] for tensor in written if _storage(tensor) in self._names]
        if not names:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if func is torch.ops.aten.copy_.default:
            self._record_copy(names[0], target, args[1])
        elif func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            if target.numel():
                self._record_zeros(names[0], target.detach())
        else:
            raise Untraceable(f"its loader calls {func} on {names[0]}")
        return target

    def _record_zeros(self, name: str, target: Tensor) -> None:
        if any(_overlap(target, destination.target) for destination in self.destinations):
            raise Untraceable(f"its loader puts zeros over what it copied into {name}")
        self.zeros.append(target)

    def _record_copy(self, name: str, target: Tensor, source: Tensor) -> None:
        if not target.numel():
            return
        if _storage(source) != _storage(self._source):
            raise Untraceable(f"its loader computes what it puts into {name}")
        if source.dtype != self._source.dtype or target.dtype != self._dtypes[_storage(target)]:
            raise Untraceable(f"its loader views what it puts into {name} as another dtype")
        is_kept = torch.promote_types(source.dtype, target.dtype) == target.dtype
        if source.shape != target.shape or not is_kept or source.is_floating_point() != target.is_floating_point():
            raise Untraceable(f"its loader reshapes or narrows what it puts into {name}")
        sizes, source_strides, target_strides = _merged_axes(source, target)
        if len(sizes) > 2 or source_strides[-1] != 1 or target_strides[-1] != 1:
            raise Untraceable(f"its loader transposes what it puts into {name}")
        num_rows = sizes[0] if len(sizes) == 2 else 1
        region = Region(int(source.storage_offset()), num_rows, sizes[-1], source_strides[0] if len(sizes) == 2 else 0)
        view_strides = (target_strides[0] if len(sizes) == 2 else 0, 1)
        view = target.detach().as_strided((num_rows, sizes[-1]), view_strides, target.storage_offset())
        self.destinations.append(Destination(self._index, region, view))


def _merged_axes(source: Tensor, target: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Return sizes and strides after merging neighbouring axes that are contiguous in both tensors."""
    sizes, source_strides, target_strides = [1], [1], [1]
    for size, source_stride, target_stride in zip(source.shape, source.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        if sizes == [1] or (source_strides[-1] == source_stride * size and target_strides[-1] == target_stride * size):
            sizes[-1] *= size
            source_strides[-1], target_strides[-1] = source_stride, target_stride
        else:
            sizes.append(size)
            source_strides.append(source_stride)
            target_strides.append(target_stride)
    return sizes, source_strides, target_strides


def _check_filled(parameters: Mapping[str, Tensor], recorder: _Recorder) -> None:
    """Raise Untraceable if a parameter is not filled completely. The rest of it would keep its initial values."""
    targets: dict[int, list[Tensor]] = {}
    for target in [*(destination.target for destination in recorder.destinations), *recorder.zeros]:
        targets.setdefault(_storage(target), []).append(target)
    for name, tensor in parameters.items():
        num_elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        filled = torch.zeros(num_elements, dtype=torch.bool, device=tensor.device)
        for target in targets.get(_storage(tensor), ()):
            filled.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(True)
        if not filled.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).all():
            raise Untraceable(f"no tensor of the policy fills all of its {name} {list(tensor.shape)}")


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensor arguments that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | dict(kwargs)
    written = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
            value = given[argument.name]
            written += [value] if isinstance(value, Tensor) else [v for v in value or () if isinstance(v, Tensor)]
    return written


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether the address ranges of two views overlap."""
    if _storage(one) != _storage(other):
        return False
    ends = [
        view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride())) for view in (one, other)
    ]
    return one.storage_offset() <= ends[1] and other.storage_offset() <= ends[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
