"""Digests on a CPU: XXH3 of bytes that are written out here, their sums over parts, and the errors that they find."""

import itertools
import struct

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from rl.sync import digest
from rl.sync.digest import Digests, TensorPart, digest_of, flat_part

CPU = torch.device("cpu")
FLOAT, BFLOAT, BYTE, LONG = torch.float32, torch.bfloat16, torch.uint8, torch.int64
VALUES = [1.0, -2.5, 1.00390625, 1.01171875, 3e38, 0.1]
FLOATS = struct.pack("<6f", *VALUES)
BFLOATS = bytes.fromhex("803f 20c0 803f 823f 627f cd3d")  # 1 + 1/256 and 1 + 3/256 are halfway: to the even ones


def hashed(data: bytes, start: int) -> list[int]:
    return list(struct.unpack("<2i", xxhash.xxh3_64(data, seed=start).digest()))


def of(values: Tensor, start: int = 0) -> list[int]:
    return digest_of(flat_part(0, values, start, values.dtype)).tolist()


def total(parts: list[TensorPart]) -> list[int]:
    digests = Digests(1, CPU)
    digests.add(parts)
    return digests.result()[0].tolist()


@pytest.mark.parametrize("start", [0, 5, 2**40])
@pytest.mark.parametrize(
    ("values", "dtype", "data"),
    [
        (torch.tensor(VALUES), FLOAT, FLOATS),
        (torch.tensor(VALUES), BFLOAT, BFLOATS),
        (torch.tensor(VALUES).bfloat16(), BFLOAT, BFLOATS),
        (torch.tensor([0, 255, 7], dtype=BYTE), BYTE, b"\x00\xff\x07"),
        (torch.tensor([-1, 2**40]), LONG, bytes.fromhex("ffffffffffffffff 0000000000010000")),
        (torch.tensor(1.0), FLOAT, bytes.fromhex("0000803f")),
    ],
    ids=["float32", "float32 as bfloat16", "bfloat16", "uint8", "int64", "scalar"],
)
def test_a_digest_is_the_hash_of_the_bytes(values: Tensor, dtype: torch.dtype, data: bytes, start: int) -> None:
    part = flat_part(0, values, start, dtype)
    assert digest_of(part).dtype == np.int32
    assert digest_of(part).tolist() == total([part]) == hashed(data, start)


@pytest.mark.parametrize("at_a_time", [1, 4, 6, 100])
def test_a_cast_in_several_pieces_is_one_hash(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CAST_ELEMENTS", at_a_time)
    assert digest_of(flat_part(0, torch.tensor(VALUES), 3, BFLOAT)).tolist() == hashed(BFLOATS, 3)
    rows = torch.tensor([[9.0, *VALUES[:3]], [9.0, *VALUES[3:]]])
    assert digest_of(TensorPart(0, rows[:, 1:], 3, 4, BFLOAT)).tolist() == hashed(BFLOATS, 3)


def test_rows_of_a_slice_are_laid_end_to_end() -> None:
    whole = torch.arange(20, dtype=BYTE).view(4, 5)
    part = TensorPart(0, whole[1:, 1:3], 6, 5, BYTE)
    assert digest_of(part).tolist() == hashed(bytes([6, 7, 11, 12, 16, 17]), 6)
    wide = torch.arange(20).view(4, 5)
    assert digest_of(TensorPart(0, wide[1:, 4:], 9, 5, LONG)).tolist() == hashed(struct.pack("<3q", 9, 14, 19), 9)


def test_parts_add_up_lane_by_lane_modulo_2_to_the_32() -> None:
    data = bytes(range(64))
    values = torch.frombuffer(bytearray(data), dtype=BYTE)
    bounds = [0, 10, 11, 40, 64]
    parts = [flat_part(0, values[a:b], a, BYTE) for a, b in itertools.pairwise(bounds)]
    halves = [hashed(data[a:b], a) for a, b in itertools.pairwise(bounds)]
    exact = [sum(lane) for lane in zip(*halves, strict=True)]
    assert max(map(abs, exact)) >= 2**31  # so at least one lane wraps around
    wanted = [(lane + 2**31) % 2**32 - 2**31 for lane in exact]
    assert all(total(list(order)) == wanted for order in itertools.permutations(parts))
    assert total(parts[:3]) != wanted


def test_each_tensor_has_a_digest_that_grows_with_every_call() -> None:
    digests = Digests(3, CPU)
    digests.add([flat_part(2, torch.tensor([4, 5], dtype=BYTE), 0, BYTE)])
    digests.add([])
    digests.add([flat_part(0, torch.tensor([6], dtype=BYTE), 1, BYTE), flat_part(2, torch.zeros(0), 9, FLOAT)])
    digests.add(
        [TensorPart(1, torch.zeros(0, 4), 0, 4, FLOAT), TensorPart(1, torch.zeros(3, 0), 0, 4, FLOAT)]
    )  # nothing
    assert digests.result().tolist() == [hashed(b"\x06", 1), [0, 0], hashed(b"\x04\x05", 0)]
    assert digests.result().dtype == torch.int32


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, BYTE, LONG], ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    values = torch.arange(9).to(dtype)
    raw, seen = values.view(BYTE), [of(values)]
    for byte, bit in itertools.product(range(len(raw)), range(8)):
        raw[byte] ^= 1 << bit
        seen.append(of(values))
        raw[byte] ^= 1 << bit
    assert of(values) == seen[0]
    assert len(set(map(tuple, seen))) == 1 + 8 * 9 * dtype.itemsize


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
def test_places_and_signs_count(dtype: torch.dtype) -> None:
    rows = torch.arange(1, 1025).to(dtype).view(4, 256)
    flat = rows.view(-1)
    swapped = torch.cat([flat[:3], flat[4:5], flat[3:4], flat[5:]])  # neighbours
    two_signs = torch.cat([-flat[:2], flat[2:]])
    others = [rows[[1, 0, 2, 3]], rows.flip(1), flat.roll(1), flat.roll(256), swapped, -rows, two_signs]
    seen = [of(rows), *map(of, others), of(rows, start=1), of(rows, start=1024)]
    assert len(set(map(tuple, seen))) == 10
