"""The memory layout of a receiver: which rows and columns of each tensor it holds, and at which addresses.

An engine fuses q, k and v into one parameter, and keeps only a tensor-parallel slice of most tensors. We need no table
of model families: the engine's own loader runs once, and its copies are recorded instead of made. A sync copies weights
to the recorded places, and verification reads them there. A loader that does more than copy (it packs, transposes or
quantizes) cannot be traced. Such a receiver is filled through its loader, and verified by what it received.

    q_proj.weight [rows, columns]  --(rows 0-511, columns 256-511)-->  a view of qkv_proj.weight
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl.model.shards import TensorInfo
from rl.sync.digest import TensorPart, flat_part

Weights = Iterator[tuple[str, Tensor]]
Loader = Callable[[Iterable[tuple[str, Tensor]]], object]


class Untraceable(Exception):
    """The loader does more than copy."""


@dataclass(frozen=True)
class OpaqueLoader:
    load: Callable[[Weights], None]  # takes whole tensors, under their Hugging Face names
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

    def part(self, values: Tensor, dtype: torch.dtype) -> TensorPart:
        return TensorPart(self.tensor, values, self.region.start, self.region.row_stride, dtype)


class MemoryLayout:
    """All destinations of one receiver. `zeros` are views of padding, which no tensor fills."""

    def __init__(
        self, tensors: Sequence[TensorInfo], destinations: Sequence[Destination], zeros: Sequence[Tensor] = ()
    ):
        self._dtypes = [info.torch_dtype for info in tensors]
        self._zeros = list(zeros)
        self._held: list[TensorPart] = []  # built once: thousands of views that never change
        self._by_tensor: list[list[Destination]] = [[] for _ in tensors]
        for destination in destinations:
            self._by_tensor[destination.tensor].append(destination)
        wholes = [[Region(0, 1, info.num_elements, 0)] for info in tensors]
        self.is_whole = [regions == whole for regions, whole in zip(self.regions, wholes, strict=True)]

    @property
    def regions(self) -> list[list[Region]]:
        return [[destination.region for destination in destinations] for destinations in self._by_tensor]

    @property
    def destinations(self) -> list[Destination]:
        return [destination for destinations in self._by_tensor for destination in destinations]

    def fill(self, whole: Mapping[int, Tensor]) -> None:
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
            destination.part(destination.region.of(whole[index]), self._dtypes[index])
            for index in whole
            if not self.is_whole[index]
            for destination in self._by_tensor[index]
        ]

    def held(self, part_bounds: Sequence[Sequence[tuple[int, int]]]) -> list[TensorPart]:
        """Return, for digests, what the receiver holds, as views of its memory. `part_bounds` holds the start and the
        number of elements of the parts in which each tensor arrived. Whole tensors are read back in these parts. The
        bounds must be the same at every call."""
        for index, destinations in enumerate(self._by_tensor if not self._held else ()):
            for destination in destinations:
                flat, dtype = destination.target[0], self._dtypes[index]
                if self.is_whole[index]:
                    bounds = part_bounds[index]
                    self._held += [flat_part(index, flat[a : a + count], a, dtype) for a, count in bounds]
                else:
                    self._held.append(destination.part(destination.target, dtype))
        return self._held


def trace(tensors: Sequence[TensorInfo], model: nn.Module, load: Loader, device: torch.device) -> MemoryLayout:
    """Record where `load` puts each tensor in the model. Raise Untraceable if it does more than copy."""
    parameters = dict(model.named_parameters())
    recorder = _Recorder(parameters | dict(model.named_buffers()))

    def weights() -> Weights:
        for index, info in enumerate(tensors):
            source = torch.ones(info.shape, dtype=info.torch_dtype, device=device)  # not zeros, which mark padding
            recorder.index, recorder.source = index, source
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
        self.index, self.source = -1, torch.empty(0)  # the tensor that the loader has been given last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _written_tensors(func, args, kwargs or {})
        if any(_storage(tensor) == _storage(self.source) for tensor in written):
            raise Untraceable(f"its loader calls {func} on what it was given")
        names = [self._names[_storage(tensor)] for tensor in written if _storage(tensor) in self._names]
        if not names:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if func is torch.ops.aten.copy_.default:
            self._record_copy(names[0], target, args[1])
        elif func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            if target.numel() and any(_overlap(target, destination.target) for destination in self.destinations):
                raise Untraceable(f"its loader puts zeros over what it copied into {names[0]}")
            self.zeros.append(target.detach())
        else:
            raise Untraceable(f"its loader calls {func} on {names[0]}")
        return target

    def _record_copy(self, name: str, target: Tensor, source: Tensor) -> None:
        if not target.numel():
            return
        if _storage(source) != _storage(self.source):
            raise Untraceable(f"its loader computes what it puts into {name}")
        if source.dtype != self.source.dtype or target.dtype != self._dtypes[_storage(target)]:
            raise Untraceable(f"its loader views what it puts into {name} as another dtype")
        is_kept = torch.promote_types(source.dtype, target.dtype) == target.dtype
        if source.shape != target.shape or not is_kept or source.is_floating_point() != target.is_floating_point():
            raise Untraceable(f"its loader reshapes or narrows what it puts into {name}")
        views = _as_rows(source, target)
        if views is None:
            raise Untraceable(f"its loader transposes what it puts into {name}")
        num_rows, num_columns = views[0].shape
        # The row stride of a single row is 0 on both sides: `_foreach_copy_` is fast only for equal strides.
        stride, target_stride = (view.stride(0) if num_rows > 1 else 0 for view in views)
        region = Region(int(source.storage_offset()), num_rows, num_columns, stride)
        view = target.detach().as_strided((num_rows, num_columns), (target_stride, 1), target.storage_offset())
        self.destinations.append(Destination(self.index, region, view))


def _as_rows(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """View both tensors as contiguous rows, as few as possible. Return None if they have no such view."""
    for axis in range(max(1, source.dim())):
        shape = (math.prod(source.shape[:axis]), math.prod(source.shape[axis:]))
        try:
            rows, target_rows = source.view(shape), target.view(shape)
        except RuntimeError:  # the axes before or after this one cannot be merged
            continue
        if shape == (1, 1) or (shape[1] > 1 and rows.stride(1) == target_rows.stride(1) == 1):
            return rows, target_rows
    return None


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
    if not func._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | dict(kwargs)
    aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}
    written = [value for name, value in given.items() if aliases[name] is not None and aliases[name].is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _overlap(one: Tensor, other: Tensor) -> bool:
    if _storage(one) != _storage(other):
        return False
    lengths = [sum((n - 1) * stride for n, stride in zip(view.shape, view.stride())) for view in (one, other)]
    start, other_start = one.storage_offset(), other.storage_offset()
    return start <= other_start + lengths[1] and other_start <= start + lengths[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
