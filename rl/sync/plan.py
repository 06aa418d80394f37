"""The plan of a weight sync: which bytes are sent when, by whom and to whom.

Every rank derives the same plan from the list of tensors. A bucket is a sequence of whole tensors in model order. All
owners (the ranks that send a shard) send their rows of one bucket before the next bucket begins.

    bucket 0   [ q_proj.weight | k_proj.weight | v_proj.weight ]    whole tensors, side by side, in their transfer dtype
                 shard 0         shard 0         shard 0            one broadcast: the rows of shard 0, packed
                 shard 1         shard 1         shard 1            another broadcast

In a model with LoRA adapters, weights that have adapters are merged with them when they are sent. All other parameters
are frozen. They are fixed: only the first version of a receiver contains them.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from rl.model.adapter_names import adapters_of, is_adapter
from rl.model.shards import TensorInfo, local_slices, named_parameters
from rl.placement.roles import Placement

BUCKET_MB = {"cuda": 128, "cpu": 32}  # smaller on CPUs, so that a bucket is still in the cache when it is used
PORTION_BYTES = 32 << 20  # of merged rows that are in memory at once
ALIGNMENT = 16  # bytes; tensors and packed rows start at multiples of this


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a tensor."""

    tensor: int  # index into the plan's tensors
    start: int  # first element in the tensor
    num_elements: int
    bytes: slice  # in the bucket's memory
    packed: slice  # bytes in a buffer of only this shard's ranges


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, their offsets in the bucket's memory, and the rows that each shard holds of them."""

    tensors: tuple[int, ...]  # indices into the plan's tensors
    offsets: tuple[int, ...]
    num_bytes: int
    ranges: tuple[tuple[RowRange, ...], ...]  # by shard

    @property
    def has_contiguous_parts(self) -> bool:
        """Whether each shard's part is contiguous in the bucket's memory, so that receivers need not unpack it."""
        return sum(map(bool, self.ranges)) == 1 or all(len(ranges) < 2 for ranges in self.ranges)

    def byte_slice(self, shard: int) -> slice:
        """Return the shard's byte range in the bucket. Without contiguous parts, only its length is meaningful."""
        ranges = self.ranges[shard]
        return ranges[0].bytes if len(ranges) == 1 else slice(0, self.packed_bytes(shard))

    def sent_bytes(self, shard: int) -> int:
        byte_slice = self.byte_slice(shard)
        return byte_slice.stop - byte_slice.start

    def packed_bytes(self, shard: int) -> int:
        return max((aligned(part.packed.stop) for part in self.ranges[shard]), default=0)


@dataclass(frozen=True)
class Plan:
    tensors: tuple[TensorInfo, ...]
    owners: tuple[int, ...]  # the rank that sends each shard
    receivers: tuple[int, ...]
    bucket_bytes: int

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of a sync that sends all tensors."""
        return self._cut(range(len(self.tensors)))

    @cached_property
    def changing_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of a sync whose receivers hold the fixed tensors already."""
        changing = [index for index in range(len(self.tensors)) if index not in self.fixed]
        return self._cut(changing) if self.fixed else self.buckets

    @cached_property
    def fixed_buckets(self) -> tuple[Bucket, ...]:
        return self._cut(sorted(self.fixed))

    @cached_property
    def fixed(self) -> frozenset[int]:
        """The tensors that are not sent again: in a model with adapters, the parameters that have none. Buffers, which
        are not sharded, may change. Without a transfer, all tensors are copied, and nothing is fixed."""
        indices = [index for index, info in enumerate(self.tensors) if info.sharded and not info.is_merged]
        return frozenset(indices if self.is_merged and self.needs_transfer else ())

    @cached_property
    def is_merged(self) -> bool:
        return any(info.is_merged for info in self.tensors)

    @cached_property
    def part_bounds(self) -> list[list[tuple[int, int]]]:
        """For each tensor, the start and the number of elements of each shard's part."""
        shards = range(len(self.owners))
        spans = [[info.span(shard, len(shards)) for shard in shards] for info in self.tensors]
        return [[(start, count) for start, count in each if count] for each in spans]

    @property
    def needs_transfer(self) -> bool:
        return set(self.owners) != set(self.receivers) or len(self.owners) > 1

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors)

    def bytes_of(self, buckets: Sequence[Bucket]) -> int:
        return sum(self.tensors[index].num_bytes for bucket in buckets for index in bucket.tensors)

    def portions(self, ranges: Sequence[RowRange]) -> list[Sequence[RowRange]]:
        """Split ranges into those that are read at once. Merged rows are computed whenever they are read, and take
        memory of their own: PORTION_BYTES, or the size of a larger tensor."""
        if not self.is_merged:
            return [ranges]
        tensors = [self.tensors[part.tensor] for part in ranges]
        return [[ranges[i] for i in each] for each in cut_buckets(tensors, range(len(ranges)), PORTION_BYTES)]

    def fit_together(self, bucket: Bucket, following: Bucket) -> bool:
        """Return whether both buckets may be in memory at once: within twice bucket_bytes plus the largest tensor."""
        largest = max(info.num_bytes for info in self.tensors)
        return bucket.num_bytes + following.num_bytes <= 2 * self.bucket_bytes + largest

    @cached_property
    def digest(self) -> str:
        """A hash of the plan. It must be equal on all ranks, because different plans would deadlock in a transfer."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def _cut(self, indices: Sequence[int]) -> tuple[Bucket, ...]:
        # Merged tensors take memory of their own, so they go in buckets even if nothing is transferred.
        is_limited = self.needs_transfer or self.is_merged
        max_bytes = self.bucket_bytes if is_limited else sum(aligned(info.num_bytes) for info in self.tensors)
        return tuple(self._bucket(tensors) for tensors in cut_buckets(self.tensors, indices, max_bytes))

    def _bucket(self, tensors: tuple[int, ...]) -> Bucket:
        sizes = (aligned(self.tensors[index].num_bytes) for index in tensors)
        *offsets, num_bytes = itertools.accumulate(sizes, initial=0)
        ranges = [self._ranges(tensors, offsets, shard) for shard in range(len(self.owners))]
        return Bucket(tensors, tuple(offsets), num_bytes, tuple(ranges))

    def _ranges(self, tensors: tuple[int, ...], offsets: list[int], shard: int) -> tuple[RowRange, ...]:
        ranges, packed = [], 0
        for index, offset in zip(tensors, offsets, strict=True):
            start, count = self.tensors[index].span(shard, len(self.owners))
            if count:
                itemsize = self.tensors[index].torch_dtype.itemsize
                begin, size = offset + start * itemsize, count * itemsize
                places = slice(begin, begin + size), slice(packed, packed + size)
                ranges.append(RowRange(index, start, count, *places))
                packed += aligned(size)
        return tuple(ranges)


def make_plan(tensors: Sequence[TensorInfo], placement: Placement, bucket_mb: int, device: torch.device) -> Plan:
    bucket_mb = bucket_mb or BUCKET_MB[device.type]
    return Plan(tuple(tensors), tuple(placement.owners), tuple(placement.receivers), bucket_mb << 20)


def cut_buckets(tensors: Sequence[TensorInfo], indices: Iterable[int], max_bytes: int) -> list[tuple[int, ...]]:
    """Split these tensors, in their order, into buckets of at most `max_bytes`. A larger tensor has its own bucket."""
    buckets: list[list[int]] = []
    used = 0
    for index in indices:
        size = aligned(tensors[index].num_bytes)
        if not buckets or used + size > max_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(index)
        used += size
    return [tuple(bucket) for bucket in buckets]


def transferred_tensors(model: nn.Module, dtype: str) -> list[TensorInfo]:
    """Return the tensors of an actor's model as they are sent. Parameters are cast to the engine's dtype, and adapters
    are merged into the weights that they belong to."""
    parameters = {name for name, _ in named_parameters(model)}
    infos = [part.info for part in local_slices(model) if not is_adapter(part.info.name)]
    merged = [replace(info, is_merged=adapters_of(info.name)[0] in parameters) for info in infos]
    is_cast = [info.name in parameters and info.torch_dtype.is_floating_point for info in infos]
    return [replace(info, dtype=dtype) if cast else info for info, cast in zip(merged, is_cast, strict=True)]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
