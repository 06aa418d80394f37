"""Send the buckets of a plan from their owners to the receivers. Each byte is sent once.

    owner      pack k+1 | send k+1 ...
    receiver              receive k+1 ...        into separate memory, while bucket k is used

A bucket in which each shard's part is contiguous is received in place, and two such buckets may be in flight. Others
arrive packed, and are unpacked when the memory of the previous bucket is free again. So a receiver holds at most
two buckets. If the largest tensor exceeds the bucket size, the limit is two bucket sizes plus this tensor. On a GPU,
transfers run on a separate stream.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl.sync.plan import Bucket, Plan, RowRange


@dataclass
class _Flight:
    bucket: Bucket
    block: Tensor  # holds the whole bucket if it is received in place, otherwise the packed parts of all shards
    is_in_place: bool
    buffers: dict[int, Tensor]  # each shard's part, a view of `block`
    works: list[dist.Work]  # on a CPU
    arrived: torch.cuda.Event | None  # on a GPU


class BucketTransfer:
    """Moves buckets of a plan. `pgs` holds the process group of each shard, or None if its owner is the only
    member. With `reuse`, the memory of a bucket is used again, so receivers must not keep it."""

    def __init__(
        self, plan: Plan, pgs: Sequence[dist.ProcessGroup | None], rank: int, device: torch.device, reuse: bool
    ):
        self._plan, self._pgs, self._rank, self._device = plan, pgs, rank, device
        self._sources: Mapping[int, Tensor] = {}
        self._receives = rank in plan.receivers
        possible = plan.buckets + plan.changing_buckets
        regular = [bucket for bucket in possible if bucket.num_bytes <= plan.bucket_bytes]
        packed = [sum(map(bucket.packed_bytes, self._shards(bucket))) for bucket in regular]
        whole = [bucket.num_bytes for bucket in regular if self._receives]
        self._pool = BufferPool(device, max(packed + whole, default=0), reuse)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.is_in_step = True  # False in a sync until all transfers of this rank have run

    def buckets(
        self, sources: Mapping[int, Tensor], buckets: Sequence[Bucket]
    ) -> Iterator[tuple[Bucket, dict[int, Tensor]]]:
        """Yield each of these buckets with its whole tensors by index. Ranks that only send get no tensors. `sources`
        are this rank's own slices by tensor index. They are flat and may be in host memory."""
        self._sources = sources
        if not self._plan.needs_transfer:
            for bucket in buckets:
                own = bucket.tensors if self._receives else ()  # the only receiver may be in another replica
                yield bucket, {i: sources[i].to(self._device).view(self._plan.tensors[i].shape) for i in own}
            return
        self.is_in_step = False
        yield from self._receive(buckets) if self._receives else self._send(buckets)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)  # before the learner changes the sources
            self._pool.clear()

    def _send(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, dict[int, Tensor]]]:
        """Yield each bucket as soon as its transfer has started. At most two are sent at a time."""
        flights: deque[_Flight] = deque()
        for bucket in buckets:
            flights.append(self._start(bucket))
            yield bucket, {}
            if len(flights) == 2:
                self._finish(flights.popleft())
        while flights:
            self._finish(flights.popleft())
        self.is_in_step = True

    def _receive(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, dict[int, Tensor]]]:
        """Yield each bucket as soon as it has arrived. Receive the next one meanwhile if there is memory for both."""
        flights: deque[_Flight] = deque()
        for bucket, following in itertools.pairwise([*buckets, None]):
            assert bucket is not None
            if not flights:
                flights.append(self._start(bucket))
            ahead = following if following is not None and self._plan.fit_together(bucket, following) else None
            if ahead is not None and bucket.has_contiguous_parts and ahead.has_contiguous_parts:
                flights.append(self._start(ahead))
            memory = self._finish(flights.popleft())
            assert memory is not None
            if ahead is not None and not flights:
                flights.append(self._start(ahead))
            self.is_in_step = following is None
            yield bucket, self._whole(bucket, memory)
            self._pool.give(memory)
            del memory  # otherwise it would be alive while the next bucket takes memory

    def _start(self, bucket: Bucket) -> _Flight:
        is_in_place = self._receives and bucket.has_contiguous_parts
        shards = self._shards(bucket)
        *starts, num_packed_bytes = itertools.accumulate(map(bucket.packed_bytes, shards), initial=0)
        # The allocator binds a block to the stream that is current now. The caller's stream uses blocks that are
        # received in place. Packed blocks are used only on the transfer stream.
        block = self._pool.take(bucket.num_bytes) if is_in_place else None
        with self._on_stream():
            block = self._pool.take(num_packed_bytes) if block is None else block
            buffers, works = {}, []
            for shard, start in zip(shards, starts, strict=True):
                packed_slice = slice(start, start + bucket.sent_bytes(shard))
                buffers[shard] = block[bucket.byte_slice(shard) if is_in_place else packed_slice]
                if self._plan.owners[shard] == self._rank:
                    self._pack(bucket.ranges[shard], buffers[shard])
                works += self._broadcast(shard, buffers[shard])
            arrived = self._stream.record_event() if self._stream is not None else None
        return _Flight(bucket, block, is_in_place, buffers, works, arrived)

    def _shards(self, bucket: Bucket) -> list[int]:
        """Return the shards whose part of the bucket this rank sends or receives."""
        owned = [self._receives or owner == self._rank for owner in self._plan.owners]
        return [shard for shard, ranges in enumerate(bucket.ranges) if ranges and owned[shard]]

    def _broadcast(self, shard: int, buffer: Tensor) -> list[dist.Work]:
        pg = self._pgs[shard]
        if pg is None:
            return []
        source = dist.get_group_rank(pg, self._plan.owners[shard])
        # On a GPU a synchronous call makes only the stream wait. So broadcasts run one after the other: two
        # communicators at once could block each other.
        work = dist.broadcast(buffer, group=pg, group_src=source, async_op=self._stream is None)
        return [] if work is None else [work]

    def _finish(self, flight: _Flight) -> Tensor | None:
        """Wait until a bucket has been sent or has arrived. Return its memory on a receiver, None elsewhere."""
        memory, arrived = flight.block if flight.is_in_place else None, flight.arrived
        for work in flight.works:
            work.wait()
        if self._receives and memory is None:
            memory = self._pool.take(flight.bucket.num_bytes)
            with self._on_stream():
                for shard, buffer in flight.buffers.items():
                    self._unpack(flight.bucket.ranges[shard], buffer, memory)
                arrived = self._stream.record_event() if self._stream is not None else None
        if self._receives and arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        if not flight.is_in_place:
            self._pool.give(flight.block)
        return memory

    def _pack(self, ranges: tuple[RowRange, ...], buffer: Tensor) -> None:
        for portion in self._plan.portions(ranges):
            views = [buffer[part.packed].view(self._plan.tensors[part.tensor].torch_dtype) for part in portion]
            torch._foreach_copy_(views, [self._sources[part.tensor] for part in portion])

    def _unpack(self, ranges: tuple[RowRange, ...], buffer: Tensor, memory: Tensor) -> None:
        torch._foreach_copy_([memory[part.bytes] for part in ranges], [buffer[part.packed] for part in ranges])

    def _whole(self, bucket: Bucket, memory: Tensor) -> dict[int, Tensor]:
        whole = {}
        for index, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            info = self._plan.tensors[index]
            whole[index] = memory[offset : offset + info.num_bytes].view(info.torch_dtype).view(info.shape)
        return whole

    def _on_stream(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        # The current stream may still be reading memory that this stream will overwrite.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class BufferPool:
    """Memory blocks for buckets. On a CPU they are kept from version to version: fresh memory costs a page fault for
    every 4 KB, which halves the speed of a sync. A block for a tensor larger than a bucket is never used for an
    ordinary bucket, because the next large tensor would then need a second large block."""

    def __init__(self, device: torch.device, bucket_bytes: int, reuse: bool):
        self._device, self._bucket_bytes, self._reuse = device, bucket_bytes, reuse
        self._free: dict[bool, list[Tensor]] = {False: [], True: []}  # by whether a block is larger than a bucket

    def take(self, num_bytes: int) -> Tensor:
        """Return a block of at least this size. Drop free blocks that are too small."""
        is_large = num_bytes > self._bucket_bytes
        free = self._free[is_large]
        fitting = next((index for index, memory in enumerate(free) if len(memory) >= num_bytes), None)
        if fitting is not None:
            return free.pop(fitting)
        free.clear()
        size = num_bytes if is_large or not self._reuse else self._bucket_bytes
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give(self, memory: Tensor) -> None:
        if self._reuse:
            self._free[len(memory) > self._bucket_bytes].append(memory)

    def clear(self) -> None:
        self._free = {False: [], True: []}
