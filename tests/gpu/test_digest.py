"""The GPU kernel of digests computes the same as its formula, written out with torch integers."""

import pytest
import torch
from torch import Tensor

from rl.sync.digest import Digests, TensorPart, flat_part

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MASK = 0xFFFFFFFF
NUM_TENSORS = 9


def odd_hash(number: Tensor, salt: int) -> Tensor:
    mixed = (number + salt) & MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & MASK
    return (mixed ^ (mixed >> 16)) | 1


def formula(part: TensorPart) -> Tensor:
    """Return [2]: the sums of mixed bits times factors that depend on their positions."""
    values, start, stride = part.values.to(part.dtype).cpu().contiguous(), part.start, part.row_stride
    if part.dtype.itemsize == 8:
        values, start, stride = values.view(torch.int32), 2 * start, 2 * stride
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.dtype.itemsize]
    bits = values.view(integer).to(torch.int64) & MASK
    position = start + torch.arange(len(bits)).unsqueeze(1) * stride + torch.arange(bits.shape[1])
    mixed = ((bits ^ (bits >> 16)) * 0x9E3779B1) & MASK
    weighted = ((mixed ^ (mixed >> 15)) * odd_hash(position % 256, 0x13198A2E)) & MASK
    sums = [((weighted * odd_hash(position // 256, salt)) & MASK).sum() for salt in (0x243F6A88, 0x85A308D3)]
    return torch.stack(sums)


def make_parts(device: str) -> list[TensorPart]:
    """Make flat and sliced parts, ragged and in whole blocks, several of one tensor, with and without a cast."""
    torch.manual_seed(0)
    wide, small = torch.randn(300, 1024).to(device), torch.randn(40_001).to(device)
    wide[5, 100:103] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    numbers = torch.randint(-(2**62), 2**62, (999,)).to(device)
    return [
        flat_part(0, wide, 0, torch.float32),
        flat_part(1, small, 12_345, torch.float32),
        flat_part(1, small[:5], 3, torch.float32),
        flat_part(2, wide, 77, torch.bfloat16),
        flat_part(3, wide.bfloat16(), 77, torch.bfloat16),
        TensorPart(4, wide.bfloat16()[:, 256:768], 256, 1024, torch.bfloat16),
        TensorPart(5, wide[:, 1:600], 1, 1024, torch.bfloat16),
        TensorPart(5, wide[10:20, 600:], 10_600, 1024, torch.bfloat16),
        flat_part(6, (small * 50).to(torch.uint8), 9, torch.uint8),
        flat_part(7, numbers, 5, torch.int64),
        flat_part(8, small[:0], 0, torch.float32),
    ]


def expected_sums(parts: list[TensorPart]) -> Tensor:
    sums = torch.zeros(NUM_TENSORS, 2, dtype=torch.int64)
    for part in parts:
        sums[part.tensor] += formula(part)
    return sums.to(torch.int32)


def test_kernel_equals_the_formula() -> None:
    parts = make_parts("cuda")
    digests = Digests(NUM_TENSORS, torch.device("cuda"))
    digests.add(parts)
    got = digests.result()
    assert torch.equal(got, expected_sums(parts))
    assert torch.equal(got[2], got[3])  # the digest is that of the cast values
    assert got[:8].ne(0).all()
    assert got[8].eq(0).all()


def test_any_changed_bit_or_place_changes_both_sums() -> None:
    values = torch.randn(700, device="cuda")
    versions = [values, -values, values.flip(0), values.roll(256), values[torch.randperm(700, device="cuda")]]
    for place, bit in ((0, 0), (299, 31), (699, 15)):
        flipped = values.view(torch.int32).clone()
        flipped[place] ^= torch.tensor(1 << bit, dtype=torch.int64, device="cuda").to(torch.int32)
        versions.append(flipped.view(torch.float32))
    digests = Digests(len(versions), torch.device("cuda"))
    digests.add([flat_part(index, version, 0, torch.float32) for index, version in enumerate(versions)])
    for column in digests.result().T.tolist():
        assert len(set(column)) == len(versions)
