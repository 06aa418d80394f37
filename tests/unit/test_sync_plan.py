"""The plan of a weight sync: its buckets, and which of their bytes each owner sends."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl.model.shards import TensorInfo
from rl.placement.roles import plan as place
from rl.sync.plan import Bucket, Plan, cut_buckets, make_plan


def info(name: str, *shape: int, dtype: str = "float32", sharded: bool = True) -> TensorInfo:
    return TensorInfo(name, shape, dtype, sharded)


def sized(name: str, num_bytes: int, dtype: str = "float32") -> TensorInfo:
    return info(name, num_bytes // getattr(torch, dtype).itemsize, dtype=dtype)


def plan_of(*tensors: TensorInfo, num_owners: int = 1, bucket_bytes: int = 1 << 20) -> Plan:
    return Plan(tensors, tuple(range(10, 10 + num_owners)), (0, 1), bucket_bytes)


@pytest.mark.parametrize("max_bytes", [96, 100])
@pytest.mark.parametrize(
    ("tensors", "buckets"),
    [
        ([sized("a", 48), sized("b", 48), sized("c", 4)], ["ab", "c"]),  # 96 bytes just fit
        ([sized("a", 36), sized("b", 48), sized("c", 4)], ["ab", "c"]),  # 36 take 48
        ([sized("a", 40), sized("b", 52), sized("c", 32)], ["a", "bc"]),  # 40 + 52 would fit, 48 + 64 do not
        ([sized("a", 40), sized("b", 400), sized("c", 40), sized("d", 40)], ["a", "b", "cd"]),  # b goes alone
        ([sized("a", 400), sized("b", 400)], ["a", "b"]),
        ([sized("a", 4), sized("b", 2, "bfloat16"), sized("c", 8, "int64"), sized("d", 4)], ["abcd"]),
        ([sized(name, 1, "uint8") for name in "abcdefg"], ["abcdef", "g"]),  # 16 bytes each
        ([sized("a", 0), sized("b", 96), sized("c", 0)], ["abc"]),
        ([sized("c", 96), sized("a", 16), sized("b", 16)], ["c", "ab"]),  # model order, not size or name
        ([], []),
    ],
)
def test_buckets_are_runs_of_whole_tensors(tensors: list[TensorInfo], buckets: list[str], max_bytes: int) -> None:
    cut = cut_buckets(tensors, range(len(tensors)), max_bytes)
    assert ["".join(tensors[index].name for index in bucket) for bucket in cut] == buckets
    assert [bucket.tensors for bucket in plan_of(*tensors, bucket_bytes=max_bytes).buckets] == cut


def test_tensors_of_a_bucket_start_at_multiples_of_16() -> None:
    tensors = [info("a", 3), info("b", 3, 3, dtype="bfloat16"), info("c", dtype="int64"), info("d", 4)]
    plan = plan_of(*tensors, info("e", 0, 4), info("f", 1, dtype="uint8"))
    (bucket,) = plan.buckets
    assert bucket.offsets == (0, 16, 48, 64, 80, 80)  # 12, 18, 8, 16, 0 and 1 bytes
    assert bucket.num_bytes == 96
    assert plan.num_bytes == 12 + 18 + 8 + 16 + 0 + 1


Spans = list[list[tuple[int, int]]]  # by owner: first element and count
A = info("a", 8, 3)


@pytest.mark.parametrize(
    ("tensor", "spans"),
    [
        (A, [[(0, 24)]]),
        (A, [[(0, 12)], [(12, 12)]]),
        (A, [[(0, 9)], [(9, 9)], [(18, 6)]]),  # 3, 3 and 2 rows
        (A, [[(0, 6)], [(6, 6)], [(12, 6)], [(18, 6)]]),
        (info("a", 9, 2), [[(0, 6)], [(6, 6)], [(12, 6)], []]),  # chunks of ceil(9 / 4) = 3 rows
        (info("a", 2, 5), [[(0, 5)], [(5, 5)], [], []]),  # fewer rows than owners
        (info("a", 1), [[(0, 1)], [], []]),
        (info("a", 6, 2, sharded=False), [[(0, 12)], [], []]),  # a buffer comes from the first alone
        (info("a", sharded=False), [[(0, 1)], []]),
        (info("a", 0, 4), [[], []]),
    ],
)
def test_what_each_owner_sends_of_a_tensor(tensor: TensorInfo, spans: Spans) -> None:
    (bucket,) = plan_of(tensor, num_owners=len(spans)).buckets
    assert [[(part.start, part.num_elements) for part in ranges] for ranges in bucket.ranges] == spans
    for part in (part for ranges in bucket.ranges for part in ranges):
        assert part.bytes == slice(4 * part.start, 4 * (part.start + part.num_elements))


MIXED = (info("a", 5, 3, dtype="bfloat16"), info("b", 3, dtype="int64", sharded=False), info("c", 4))


def test_where_the_ranges_of_mixed_dtypes_lie() -> None:
    (bucket,) = plan_of(*MIXED, num_owners=2).buckets
    assert bucket.offsets == (0, 32, 64)  # 30, 24 and 16 bytes
    first, second = bucket.ranges
    assert [(part.tensor, part.bytes) for part in first] == [
        (0, slice(0, 18)),
        (1, slice(32, 56)),
        (2, slice(64, 72)),
    ]
    assert [(part.tensor, part.bytes) for part in second] == [(0, slice(18, 30)), (2, slice(72, 80))]
    assert ([part.packed.start for part in first], bucket.packed_bytes(0)) == ([0, 32, 64], 80)  # 18, 24 and 8 bytes
    assert ([part.packed.start for part in second], bucket.packed_bytes(1)) == ([0, 16], 32)  # 12 and 8 bytes
    assert not bucket.has_contiguous_parts


@pytest.mark.parametrize(
    ("tensors", "num_owners", "byte_slices"),
    [
        (MIXED, 1, [slice(0, 80)]),  # one owner: all of the memory, with the gaps
        (MIXED, 2, None),
        ((info("a", 5, 3),), 2, [slice(0, 36), slice(36, 60)]),  # one tensor: exact, no gaps between
        ((info("a", 2, 3),), 4, [slice(0, 12), slice(12, 24), None, None]),
        ((info("a", 6, sharded=False), info("b", 1, 3)), 3, [slice(0, 48), None, None]),  # all from the first
        ((info("a", 6), info("b", 0, 3)), 2, [slice(0, 12), slice(12, 24)]),
        ((info("a", 1), info("b", 2)), 2, None),  # the second's part is contiguous, the first's is not
    ],
)
def test_contiguous_parts(
    tensors: tuple[TensorInfo, ...], num_owners: int, byte_slices: list[slice | None] | None
) -> None:
    (bucket,) = plan_of(*tensors, num_owners=num_owners).buckets
    assert bucket.has_contiguous_parts == (byte_slices is not None)
    for owner, wanted in enumerate(byte_slices or []):
        assert wanted == (bucket.byte_slice(owner) if bucket.ranges[owner] else None)


def random_model(source: random.Random) -> tuple[TensorInfo, ...]:
    def one(index: int) -> TensorInfo:
        shape = tuple(source.choice([1, 2, 3, 5, 8, 13]) for _ in range(source.choice([1, 1, 2, 3])))
        dtype = source.choice(["bfloat16", "bfloat16", "float32", "int64", "uint8"])
        return TensorInfo(f"t{index}", () if source.random() < 0.1 else shape, dtype, source.random() < 0.8)

    return tuple(one(index) for index in range(source.choice([1, 2, 7, 12])))


def random_tensor(tensor: TensorInfo) -> Tensor:
    return torch.randint(0, 256, (tensor.num_bytes,), dtype=torch.uint8).view(tensor.torch_dtype).view(tensor.shape)


def sliced(whole: Tensor, tensor: TensorInfo, owner: int, num_owners: int) -> Tensor:
    """Return an owner's slice as torch cuts it."""
    if not tensor.sharded or not tensor.shape:
        return whole if owner == 0 else whole.reshape(-1)[:0]
    chunks = whole.chunk(num_owners)
    return chunks[owner] if owner < len(chunks) else whole[:0]


def received(plan: Plan, bucket: Bucket, wholes: list[Tensor]) -> Tensor:
    """Return the bucket's memory after each owner has packed and sent its slices."""
    memory = torch.full((bucket.num_bytes,), 170, dtype=torch.uint8)
    for owner, ranges in enumerate(bucket.ranges):
        if not ranges:
            continue
        sent = torch.zeros(bucket.sent_bytes(owner), dtype=torch.uint8)
        for part in ranges:
            tensor = plan.tensors[part.tensor]
            piece = sliced(wholes[part.tensor], tensor, owner, len(plan.owners))
            sent[part.packed].view(tensor.torch_dtype).copy_(piece.reshape(-1))
        if bucket.has_contiguous_parts:
            memory[bucket.byte_slice(owner)] = sent
        else:
            for part in ranges:
                memory[part.bytes] = sent[part.packed]
    return memory


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_packed_slices_give_whole_tensors_again(seed: int, bucket_bytes: int, num_owners: int) -> None:
    source = random.Random(seed)
    torch.manual_seed(seed)
    plan = plan_of(*random_model(source), num_owners=num_owners, bucket_bytes=bucket_bytes)
    wholes = [random_tensor(tensor) for tensor in plan.tensors]
    seen = []
    for bucket in plan.buckets:
        memory = received(plan, bucket, wholes)
        for index, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            tensor = plan.tensors[index]
            got = memory[offset : offset + tensor.num_bytes].view(tensor.torch_dtype).view(tensor.shape)
            assert got.dtype == wholes[index].dtype
            assert torch.equal(got.reshape(-1).view(torch.uint8), wholes[index].reshape(-1).view(torch.uint8))
            seen.append(index)
    assert seen == list(range(len(plan.tensors)))


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_byte_is_sent_once(seed: int, num_owners: int) -> None:
    plan = plan_of(*random_model(random.Random(seed)), num_owners=num_owners, bucket_bytes=200)
    for bucket in plan.buckets:
        covered = Counter(
            byte for ranges in bucket.ranges for part in ranges for byte in range(part.bytes.start, part.bytes.stop)
        )
        wanted = [
            byte
            for index, offset in zip(bucket.tensors, bucket.offsets, strict=True)
            for byte in range(offset, offset + plan.tensors[index].num_bytes)
        ]
        assert covered == dict.fromkeys(wanted, 1)


PLAN = Plan((info("a", 4, 2), info("b", 3)), (2, 3), (0, 1), 1024)


def test_equal_plans_have_equal_digests() -> None:
    again = Plan((info("a", 4, 2), info("b", 3)), (2, 3), (0, 1), 1024)
    assert again is not PLAN
    assert again.digest == PLAN.digest


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, tensors=PLAN.tensors[::-1]),
        replace(PLAN, tensors=PLAN.tensors[:1]),
        replace(PLAN, tensors=(info("a", 2, 4), info("b", 3))),
        replace(PLAN, tensors=(info("a", 4, 2), info("c", 3))),
        replace(PLAN, tensors=(info("a", 4, 2), info("b", 3, dtype="int32"))),
        replace(PLAN, tensors=(info("a", 4, 2), info("b", 3, sharded=False))),
        replace(PLAN, tensors=(replace(info("a", 4, 2), is_merged=True), info("b", 3))),
        replace(PLAN, owners=(3, 2)),
        replace(PLAN, owners=(2,)),
        replace(PLAN, receivers=(0,)),
        replace(PLAN, receivers=(0, 1, 2)),
        replace(PLAN, bucket_bytes=1025),
    ],
)
def test_other_plans_have_other_digests(other: Plan) -> None:
    assert other.digest != PLAN.digest


@pytest.mark.parametrize(
    ("owners", "receivers", "needs_transfer"),
    [
        ((0,), (0,), False),  # one rank does it all
        ((0,), (1,), True),
        ((0,), (0, 1), True),
        ((0, 1), (0, 1), True),  # each needs what the other owns
        ((0, 1), (0,), True),
    ],
)
def test_needs_transfer(owners: tuple[int, ...], receivers: tuple[int, ...], needs_transfer: bool) -> None:
    assert Plan(PLAN.tensors, owners, receivers, 1024).needs_transfer is needs_transfer


@pytest.mark.parametrize(
    ("owners", "receivers", "num_buckets"), [((0,), (0,), 1), ((0,), (0, 1), 3), ((0, 1), (0,), 3)]
)
def test_without_a_transfer_there_is_one_bucket(
    owners: tuple[int, ...], receivers: tuple[int, ...], num_buckets: int
) -> None:
    """Tensors of 32, 12 and 33 bytes begin at multiples of 16."""
    plan = Plan((*PLAN.tensors, info("c", 33, dtype="uint8")), owners, receivers, bucket_bytes=32)
    assert len(plan.buckets) == num_buckets
    assert sum(bucket.num_bytes for bucket in plan.buckets) == 32 + 16 + 48


def random_adapters(tensors: tuple[TensorInfo, ...], source: random.Random) -> tuple[TensorInfo, ...]:
    """Mark some sharded tensors, at least the first, as merged."""
    is_merged = [info.sharded and (index == 0 or source.random() < 0.4) for index, info in enumerate(tensors)]
    return tuple(replace(info, is_merged=marked) for info, marked in zip(tensors, is_merged, strict=True))


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(8))
def test_tensors_with_adapters_and_buffers_change_and_all_others_are_fixed(seed: int, bucket_bytes: int) -> None:
    source = random.Random(seed)
    tensors = random_adapters((info("first", 3, 2), *random_model(source)), source)
    plan = plan_of(*tensors, num_owners=2, bucket_bytes=bucket_bytes)
    fixed = [index for index, tensor in enumerate(tensors) if tensor.sharded and not tensor.is_merged]
    assert [index for bucket in plan.fixed_buckets for index in bucket.tensors] == fixed
    changing = [index for index in range(len(tensors)) if index not in fixed]
    assert [index for bucket in plan.changing_buckets for index in bucket.tensors] == changing
    assert [index for bucket in plan.buckets for index in bucket.tensors] == list(range(len(tensors)))
    assert plan.bytes_of(plan.changing_buckets) + plan.bytes_of(plan.fixed_buckets) == plan.num_bytes
    for bucket in (*plan.changing_buckets, *plan.fixed_buckets):
        assert bucket.num_bytes <= bucket_bytes or len(bucket.tensors) == 1 or not plan.bytes_of([bucket])


def test_without_adapters_nothing_is_fixed() -> None:
    assert (PLAN.fixed, PLAN.fixed_buckets, PLAN.is_merged) == (frozenset(), (), False)
    assert PLAN.changing_buckets == PLAN.buckets


def test_merged_tensors_take_memory_so_they_never_share_one_bucket() -> None:
    """Without a transfer too: one bucket would be a merged copy of the model."""
    tensors = [replace(info(name, 4, 2), is_merged=True) for name in "abc"]
    plan = Plan((*tensors, info("d", 4, 2)), (0,), (0,), bucket_bytes=32)
    assert not plan.needs_transfer and not plan.fixed
    assert [bucket.tensors for bucket in plan.buckets] == [(0,), (1,), (2,), (3,)]
    assert plan.changing_buckets == plan.buckets


def test_part_bounds_are_every_owners_part_of_every_tensor() -> None:
    tensors = (info("a", 5, 2), info("b", 1, 3), info("c", 4, sharded=False), info("d", 0, 2), info("e", 3))
    wanted = [[(0, 6), (6, 4)], [(0, 3)], [(0, 4)], [], [(0, 2), (2, 1)]]  # rows of a: 3 and 2
    for bucket_bytes in (1, 64, 1024):
        assert plan_of(*tensors, num_owners=2, bucket_bytes=bucket_bytes).part_bounds == wanted
    assert plan_of(*tensors).part_bounds == [[(0, 10)], [(0, 3)], [(0, 4)], [], [(0, 3)]]


@pytest.mark.parametrize(
    ("bucket_mb", "device", "num_bytes"), [(0, "cpu", 32 << 20), (0, "cuda", 128 << 20), (3, "cuda", 3 << 20)]
)
def test_make_plan(bucket_mb: int, device: str, num_bytes: int) -> None:
    placement = place({"rollout": "0-1", "inference": "2", "actor": "3-4"}, 1, 5)
    plan = make_plan(list(PLAN.tensors), placement, bucket_mb, torch.device(device))
    assert plan == Plan(PLAN.tensors, (3, 4), (0, 1, 2), num_bytes)
