"""The plan of a weight sync: which bytes are sent when, by whom and to whom.

Every rank derives it from the list of tensors, so no rank has to be told. A bucket is a run of whole tensors in model
order, and every owner sends its slices of a bucket before the next begins.

    bucket 0   [ q_proj.weight | k_proj.weight | v_proj.weight ]    whole tensors, side by side, in their transfer dtype
                 owner 0        owner 0         owner 0             one broadcast: owner 0's rows of each, packed
                 owner 1        owner 1         owner 1             another
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from rl.model.shards import TensorInfo, local_slices
from rl.placement.roles import Placement

BUCKET_MB = {"cuda": 128, "cpu": 32}  # a CPU uses what arrives while it is in the cache
ALIGNMENT = 16  # bytes; tensors and packed slices start at multiples of it


@dataclass(frozen=True)
class Range:
    """Consecutive rows of a tensor; `offset` is where they lie in the bucket's memory."""

    tensor: int  # index into the plan's tensors
    start: int  # first element in the tensor
    num_elements: int
    offset: int
    num_bytes: int

    @property
    def stretch(self) -> slice:
        return slice(self.offset, self.offset + self.num_bytes)


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, with the place of each in the bucket's memory, and what every owner holds of them."""

    tensors: range  # indices into the plan's tensors
    offsets: tuple[int, ...]
    num_bytes: int
    ranges: tuple[tuple[Range, ...], ...]  # by owner

    @property
    def is_in_place(self) -> bool:
        """Whether each owner's part is contiguous in the bucket's memory, so that receivers need not unpack it."""
        return sum(map(bool, self.ranges)) == 1 or all(len(ranges) < 2 for ranges in self.ranges)

    def stretch(self, owner: int) -> slice:
        """Return where the owner's part lies in a bucket that is in place."""
        ranges = self.ranges[owner]
        return ranges[0].stretch if len(ranges) == 1 else slice(0, self.packed_bytes(owner))

    def sent_bytes(self, owner: int) -> int:
        """Return how many bytes the owner sends."""
        stretch = self.stretch(owner)
        return stretch.stop - stretch.start

    def packed_bytes(self, owner: int) -> int:
        return sum(_aligned(part.num_bytes) for part in self.ranges[owner])


@dataclass(frozen=True)
class Plan:
    tensors: tuple[TensorInfo, ...]
    owners: tuple[int, ...]  # by shard: the rank that sends it
    receivers: tuple[int, ...]
    bucket_bytes: int

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        max_bytes = self.bucket_bytes if self.needs_transfer else self.num_bytes + ALIGNMENT * len(self.tensors)
        return tuple(self._bucket(tensors) for tensors in cut_buckets(self.tensors, max_bytes))

    @cached_property
    def cuts(self) -> list[list[tuple[int, int]]]:
        """By tensor: start and number of elements of each owner's part."""
        cuts: list[list[tuple[int, int]]] = [[] for _ in self.tensors]
        for bucket in self.buckets:
            for part in (part for ranges in bucket.ranges for part in ranges):
                cuts[part.tensor].append((part.start, part.num_elements))
        return cuts

    @property
    def needs_transfer(self) -> bool:
        return set(self.owners) != set(self.receivers) or len(self.owners) > 1

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors)

    def fits(self, bucket: Bucket, following: Bucket) -> bool:
        """Whether both may be in memory at once: two buckets, or one and a tensor that is larger than a bucket."""
        largest = max(info.num_bytes for info in self.tensors)
        return bucket.num_bytes + following.num_bytes <= 2 * self.bucket_bytes + largest

    @cached_property
    def digest(self) -> str:
        """A digest that must be equal on all ranks: otherwise they would wait for each other inside a transfer."""
        text = repr((self.tensors, self.owners, self.receivers, self.bucket_bytes))
        return hashlib.sha256(text.encode()).hexdigest()

    def _bucket(self, tensors: range) -> Bucket:
        offsets, num_bytes = [], 0
        for index in tensors:
            offsets.append(num_bytes)
            num_bytes += _aligned(self.tensors[index].num_bytes)
        ranges = [self._ranges(tensors, offsets, owner) for owner in range(len(self.owners))]
        return Bucket(tensors, tuple(offsets), num_bytes, tuple(ranges))

    def _ranges(self, tensors: range, offsets: list[int], owner: int) -> tuple[Range, ...]:
        ranges = []
        for index, offset in zip(tensors, offsets, strict=True):
            info = self.tensors[index]
            first, end = info.rows(owner, len(self.owners))
            start, count = first * info.row_elements, (end - first) * info.row_elements
            if count:
                itemsize = info.torch_dtype.itemsize
                ranges.append(Range(index, start, count, offset + start * itemsize, count * itemsize))
        return tuple(ranges)


def make_plan(tensors: Sequence[TensorInfo], placement: Placement, bucket_mb: int, device: torch.device) -> Plan:
    bucket_mb = bucket_mb or BUCKET_MB[device.type]
    return Plan(tuple(tensors), tuple(placement.owners), tuple(placement.receivers), bucket_mb << 20)


def cut_buckets(tensors: tuple[TensorInfo, ...], max_bytes: int) -> list[range]:
    """Return runs of whole tensors in model order, each at most `max_bytes` unless one tensor alone is larger."""
    buckets: list[range] = []
    used = 0
    for index, info in enumerate(tensors):
        if not buckets or used + _aligned(info.num_bytes) > max_bytes:
            buckets.append(range(index, index))
            used = 0
        buckets[-1] = range(buckets[-1].start, index + 1)
        used += _aligned(info.num_bytes)
    return buckets


def transferred_tensors(model: nn.Module, dtype: str) -> list[TensorInfo]:
    """Return the tensors of an actor's model as they are sent: parameters in the engine's dtype."""
    parameters = {name for name, _ in model.named_parameters()}
    infos = []
    for part in local_slices(model):
        info = part.info
        is_cast = info.name in parameters and info.torch_dtype.is_floating_point
        infos.append(replace(info, dtype=dtype if is_cast else info.dtype))
    return infos


def view_in(memory: Tensor, offset: int, info: TensorInfo, num_elements: int) -> Tensor:
    """Return a flat view of a tensor's elements in a bucket's bytes."""
    return memory[offset : offset + num_elements * info.torch_dtype.itemsize].view(info.torch_dtype)


def packed_offsets(ranges: tuple[Range, ...]) -> list[int]:
    """Return where each of an owner's ranges begins in its packed memory."""
    offsets, used = [], 0
    for part in ranges:
        offsets.append(used)
        used += _aligned(part.num_bytes)
    return offsets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
