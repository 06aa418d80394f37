"""What a rank receives of each bucket, and how much memory it holds; in one process, so nothing is broadcast."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rl.model.shards import TensorInfo
from rl.sync.plan import Plan
from rl.sync.transfer import BucketTransfer, BufferPool

CPU = torch.device("cpu")


def make_plan(sizes: list[int], owners: tuple[int, ...], receivers: tuple[int, ...], bucket_bytes: int) -> Plan:
    tensors = tuple(TensorInfo(f"t{index}", (size,), "uint8", True) for index, size in enumerate(sizes))
    return Plan(tensors, owners, receivers, bucket_bytes)


def own_slices(plan: Plan, rank: int) -> dict[int, Tensor]:
    """Return a rank's slices: all elements of tensor i are i + 1."""
    if rank not in plan.owners:
        return {}
    rows = [info.rows(plan.owners.index(rank), len(plan.owners)) for info in plan.tensors]
    return {i: torch.full((end - first,), i + 1, dtype=torch.uint8) for i, (first, end) in enumerate(rows)}


@pytest.mark.parametrize(("rank", "got"), [(0, {0: [1] * 8, 1: [2] * 3}), (1, {})])
def test_without_a_transfer_the_owner_has_whole_tensors_and_a_second_replica_nothing(
    rank: int, got: dict[int, list[int]]
) -> None:
    plan = make_plan([8, 3], (0,), (0,), bucket_bytes=16)
    transfer = BucketTransfer(plan, [None], rank, CPU, reuse=True)
    found = [
        {index: tensor.tolist() for index, tensor in whole.items()}
        for _, whole in transfer.buckets(own_slices(plan, rank), plan.buckets)
    ]
    assert found == [got]


@pytest.mark.parametrize("bucket_bytes", [16, 64])
def test_an_owner_that_receives_has_its_own_part_in_place(bucket_bytes: int) -> None:
    """In packed buckets and in buckets in place. The other owner's part is undefined, as nothing is broadcast."""
    plan = make_plan([40, 10, 6], (0, 1), (0,), bucket_bytes)
    transfer = BucketTransfer(plan, [None, None], 0, CPU, reuse=True)
    found = {
        index: tensor.tolist()
        for _, whole in transfer.buckets(own_slices(plan, 0), plan.buckets)
        for index, tensor in whole.items()
    }
    assert {index: len(values) for index, values in found.items()} == {0: 40, 1: 10, 2: 6}
    assert (found[0][:20], found[1][:5], found[2][:3]) == ([1] * 20, [2] * 5, [3] * 3)


class WatchedPool(BufferPool):
    """Measures how many bytes are in use at most, and how many the pool holds at most, with free ones."""

    def __init__(self, device: torch.device, bucket_bytes: int, reuse: bool):
        super().__init__(device, bucket_bytes, reuse)
        self.out: list[Tensor] = []
        self.most_out = self.most_held = 0

    def take(self, num_bytes: int) -> Tensor:
        memory = super().take(num_bytes)
        assert len(memory) >= num_bytes
        assert all(memory is not other for other in self.out)
        self.out.append(memory)
        out = sum(map(len, self.out))
        self.most_out = max(self.most_out, out)
        self.most_held = max(self.most_held, out + self.num_free_bytes)
        return memory

    def give(self, memory: Tensor) -> None:
        (place,) = [index for index, other in enumerate(self.out) if other is memory]
        del self.out[place]
        super().give(memory)
        self.most_held = max(self.most_held, sum(map(len, self.out)) + self.num_free_bytes)

    @property
    def num_free_bytes(self) -> int:
        return sum(len(memory) for blocks in self._free.values() for memory in blocks)


def watch(plan: Plan, rank: int, reuse: bool) -> WatchedPool:
    """Transfer two versions and return the pool that they used."""
    pools: list[WatchedPool] = []

    def make_pool(device: torch.device, bucket_bytes: int, reuse: bool) -> WatchedPool:
        pools.append(WatchedPool(device, bucket_bytes, reuse))
        return pools[-1]

    with patch("rl.sync.transfer.BufferPool", make_pool):
        transfer = BucketTransfer(plan, [None] * len(plan.owners), rank, CPU, reuse)
    (pool,) = pools
    for _ in range(2):
        seen: list[int] = []
        for bucket, whole in transfer.buckets(own_slices(plan, rank), plan.buckets):
            assert pool.out or rank not in plan.owners + plan.receivers
            assert [*whole] == ([*bucket.tensors] if rank in plan.receivers else [])
            seen += bucket.tensors
        assert seen == list(range(len(plan.tensors)))
        assert pool.out == []
        assert transfer.is_in_step
    return pool


FOUR = (0, 1, 2, 3)
EVEN, GROWING, UNEVEN = [128] * 16, [64, 64, 128, 128, 192, 192, 256, 256], [256, 256, 64, 448, 64, 64, 320, 128, 128]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("sizes", [EVEN, GROWING, GROWING[::-1], UNEVEN])
@pytest.mark.parametrize(
    ("owners", "receivers", "rank", "has_contiguous_parts", "limit"),
    [
        ((0,), (9,), 0, True, 2),  # a pure sender
        ((0,), (9,), 9, True, 2),
        ((0,), (0, 9), 0, True, 2),  # an owner that receives
        (FOUR, (9,), 2, False, 0.5),  # a sender of quarters
        (FOUR, (9,), 9, False, 2),
        (FOUR, FOUR, 1, False, 2),
        (FOUR, (9,), 8, False, 0),  # another replica's rank
    ],
)
def test_a_rank_holds_at_most_two_buckets(
    owners: tuple[int, ...],
    receivers: tuple[int, ...],
    rank: int,
    has_contiguous_parts: bool,
    limit: float,
    sizes: list[int],
    reuse: bool,
) -> None:
    plan = make_plan(sizes, owners, receivers, bucket_bytes=512)
    assert len(plan.buckets) > 2
    assert {bucket.has_contiguous_parts for bucket in plan.buckets} == {has_contiguous_parts}
    pool = watch(plan, rank, reuse)
    assert pool.most_held <= limit * 512
    if sizes is EVEN:
        assert pool.most_out == limit * 512  # not less: a bucket is on its way while another is used


@pytest.mark.parametrize(
    "sizes",
    [
        [256, 256, 128, 128],  # two buckets in place, then a packed one: 2.75
        [128, 128, 256],  # a packed one, then one in place: 3.5 from the second version on
    ],
)
def test_a_rank_holds_at_most_two_buckets_if_only_some_are_packed(sizes: list[int]) -> None:
    plan = make_plan(sizes, FOUR, (9,), bucket_bytes=256)
    assert {bucket.has_contiguous_parts for bucket in plan.buckets} == {True, False}
    assert watch(plan, 9, reuse=True).most_out <= 2 * 256


def test_a_tensor_that_is_larger_than_a_bucket_adds_its_size() -> None:
    """An embedding and a head are such tensors, with layers between them."""
    plan = make_plan([1024, *[128] * 6, 1024], (0,), (9,), bucket_bytes=256)
    for rank in (0, 9):
        assert watch(plan, rank, reuse=True).most_held <= 2 * 256 + 1024
