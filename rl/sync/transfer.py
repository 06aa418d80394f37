"""Send the buckets of a plan from their owners to the receivers, each byte once, one bucket ahead of its use.

    owner      pack k+1 | send k+1 ...
    receiver              receive k+1 ...        into memory of its own, while bucket k is used

A bucket in which each owner's part is contiguous is received in place, and two such buckets may be in flight. Others
arrive packed and are unpacked when the memory of the bucket before is free again. Either way a rank holds at most two
buckets; only a tensor that is larger than a bucket adds its size. On a GPU all of this runs on a stream of its own, and
the current stream waits for a bucket only when it uses it.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl.sync.plan import Bucket, Plan, Range, packed_offsets, view_in


@dataclass
class _Flight:
    """A bucket that is being sent or received."""

    bucket: Bucket
    memory: Tensor | None  # of the whole bucket, if it is received in place
    packed: Tensor | None  # of the owners' parts, otherwise
    buffers: dict[int, Tensor]  # by owner: its part, in one of these memories
    works: list[dist.Work]  # on a CPU
    arrived: torch.cuda.Event | None  # on a GPU


class BucketTransfer:
    """Moves all buckets of a plan. `pgs` are the process groups by owner, None where the owner is the only member. With
    `reuse` the memory of a bucket is used again, so receivers must not keep it."""

    def __init__(
        self, plan: Plan, pgs: Sequence[dist.ProcessGroup | None], rank: int, device: torch.device, reuse: bool
    ):
        self._plan, self._pgs, self._rank, self._device = plan, pgs, rank, device
        self._sources: dict[int, Tensor] = {}
        self._receives = rank in plan.receivers
        regular = [self._most_bytes(bucket) for bucket in plan.buckets if bucket.num_bytes <= plan.bucket_bytes]
        self._pool = BufferPool(device, max(regular, default=0), reuse)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.is_in_step = True  # False from the first transfer to the last

    def buckets(self, sources: dict[int, Tensor]) -> Iterator[tuple[Bucket, dict[int, Tensor]]]:
        """Yield each bucket with its whole tensors by index; without tensors on ranks that only send.

        `sources` are this rank's own slices by index, flat; they may lie in host memory.
        """
        self._sources = sources
        if not self._plan.needs_transfer:
            for bucket in self._plan.buckets:
                own = bucket.tensors if self._receives else ()  # otherwise another replica's rank is the only receiver
                yield bucket, {i: sources[i].to(self._device).view(self._plan.tensors[i].shape) for i in own}
            return
        self.is_in_step = False
        yield from self._receive() if self._receives else self._send()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)  # before the learner changes the sources
            self._pool.clear()

    def _send(self) -> Iterator[tuple[Bucket, dict[int, Tensor]]]:
        """Yield each bucket as soon as it is being sent; two are sent at a time."""
        flights: deque[_Flight] = deque()
        for bucket in self._plan.buckets:
            flights.append(self._start(bucket))
            yield bucket, {}
            if len(flights) == 2:
                self._finish(flights.popleft())
        while flights:
            self._finish(flights.popleft())
        self.is_in_step = True

    def _receive(self) -> Iterator[tuple[Bucket, dict[int, Tensor]]]:
        """Yield each bucket as soon as it has arrived. The next is being received if there is memory for both."""
        flights: deque[_Flight] = deque()
        for bucket, following in itertools.pairwise([*self._plan.buckets, None]):
            assert bucket is not None
            if not flights:
                flights.append(self._start(bucket))
            fits = following is not None and self._plan.fits(bucket, following)
            if following is not None and fits and bucket.is_in_place and following.is_in_place:
                flights.append(self._start(following))
            memory = self._finish(flights.popleft())
            assert memory is not None
            if following is not None and fits and not flights:
                flights.append(self._start(following))
            self.is_in_step = following is None
            yield bucket, self._whole(bucket, memory)
            self._pool.give(memory)
            del memory  # not to hold it while the next is taken

    def _start(self, bucket: Bucket) -> _Flight:
        in_place = self._receives and bucket.is_in_place
        owners = self._owners(bucket)
        memory = self._pool.take(bucket.num_bytes) if in_place else None
        with self._on_stream():
            packed = None if in_place else self._pool.take(sum(map(bucket.packed_bytes, owners)))
            buffers, works, used = {}, [], 0
            for owner in owners:
                if memory is not None:
                    buffer = memory[bucket.stretch(owner)]
                else:
                    assert packed is not None
                    buffer = packed[used : used + bucket.sent_bytes(owner)]
                    used += bucket.packed_bytes(owner)
                if self._plan.owners[owner] == self._rank:
                    self._pack(bucket.ranges[owner], buffer)
                buffers[owner] = buffer
                works += self._broadcast(owner, buffer)
            arrived = self._stream.record_event() if self._stream is not None else None
        return _Flight(bucket, memory, packed, buffers, works, arrived)

    def _most_bytes(self, bucket: Bucket) -> int:
        """Return the largest memory that this rank takes for a bucket."""
        return max(bucket.num_bytes if self._receives else 0, sum(map(bucket.packed_bytes, self._owners(bucket))))

    def _owners(self, bucket: Bucket) -> list[int]:
        """Return the owners whose part of the bucket this rank sends or receives."""
        return [
            owner
            for owner, rank in enumerate(self._plan.owners)
            if bucket.ranges[owner] and (self._receives or rank == self._rank)
        ]

    def _broadcast(self, owner: int, buffer: Tensor) -> list[dist.Work]:
        pg = self._pgs[owner]
        if pg is None:
            return []
        source = dist.get_group_rank(pg, self._plan.owners[owner])
        # On a GPU a synchronous call waits in the stream only. Two communicators at once could block each other.
        work = dist.broadcast(buffer, group=pg, group_src=source, async_op=self._stream is None)
        return [] if work is None else [work]

    def _finish(self, flight: _Flight) -> Tensor | None:
        """Wait until a bucket has been sent or has arrived; return its memory on a receiver."""
        memory, arrived = flight.memory, flight.arrived
        for work in flight.works:
            work.wait()
        if self._receives and memory is None:
            memory = self._pool.take(flight.bucket.num_bytes)
            with self._on_stream():
                for owner, buffer in flight.buffers.items():
                    self._unpack(flight.bucket.ranges[owner], buffer, memory)
                arrived = self._stream.record_event() if self._stream is not None else None
        if self._receives and arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        if flight.packed is not None:
            self._pool.give(flight.packed)
        return memory

    def _pack(self, ranges: tuple[Range, ...], buffer: Tensor) -> None:
        views = [
            view_in(buffer, offset, self._plan.tensors[part.tensor], part.num_elements)
            for part, offset in zip(ranges, packed_offsets(ranges), strict=True)
        ]
        torch._foreach_copy_(views, [self._sources[part.tensor] for part in ranges])

    def _unpack(self, ranges: tuple[Range, ...], buffer: Tensor, memory: Tensor) -> None:
        places = zip(ranges, packed_offsets(ranges), strict=True)
        sources = [buffer[offset : offset + part.num_bytes] for part, offset in places]
        torch._foreach_copy_([memory[part.stretch] for part in ranges], sources)

    def _whole(self, bucket: Bucket, memory: Tensor) -> dict[int, Tensor]:
        tensors = self._plan.tensors
        return {
            index: view_in(memory, offset, tensors[index], tensors[index].num_elements).view(tensors[index].shape)
            for index, offset in zip(bucket.tensors, bucket.offsets, strict=True)
        }

    def _on_stream(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        # The current stream may still read memory that is used again here.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class BufferPool:
    """Memory for buckets, used again. On a CPU fresh memory costs a page fault for every 4 KB, which halves the speed
    of a sync, so there it is kept from version to version too. Blocks for tensors that are larger than a bucket are
    never used for ordinary buckets: the next large tensor would need a second block of that size."""

    def __init__(self, device: torch.device, bucket_bytes: int, reuse: bool):
        self._device, self._bucket_bytes, self._reuse = device, bucket_bytes, reuse
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return a block of at least this size."""
        is_large = num_bytes > self._bucket_bytes
        alike = [memory for memory in self._free if (len(memory) > self._bucket_bytes) == is_large]
        fitting = [memory for memory in alike if len(memory) >= num_bytes]
        dropped = fitting[:1] or alike  # blocks that are free but too small are freed
        self._free = [memory for memory in self._free if not any(memory is block for block in dropped)]
        if fitting:
            return fitting[0]
        del alike, dropped
        size = num_bytes if is_large or not self._reuse else self._bucket_bytes
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give(self, memory: Tensor) -> None:
        if self._reuse:
            self._free.append(memory)

    def clear(self) -> None:
        self._free.clear()
