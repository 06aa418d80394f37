"""The GPU kernel's digests are those of the CPU, which tests/unit/test_sync_digest.py checks against the formula."""

import pytest
import torch

from rl.sync.digest import Digests, Part, flat_part

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def parts_on(device: str) -> list[Part]:
    """Flat and sliced, ragged and in whole blocks, several of one tensor, with and without a cast."""
    torch.manual_seed(0)
    wide, small = torch.randn(300, 1000).to(device), torch.randn(40_001).to(device)
    numbers = torch.randint(-(2**62), 2**62, (999,)).to(device)
    return [
        flat_part(0, wide, 0, torch.float32),
        flat_part(1, small, 12_345, torch.float32),
        flat_part(1, small[:5], 3, torch.float32),
        flat_part(2, wide, 77, torch.bfloat16),
        flat_part(3, wide.bfloat16(), 77, torch.bfloat16),
        Part(4, wide.bfloat16()[:, 256:768], 256, 1000, torch.bfloat16),
        Part(5, wide[:, 1:600], 1, 1000, torch.bfloat16),
        Part(5, wide[10:20, 600:], 10_600, 1000, torch.bfloat16),
        flat_part(6, (small * 50).to(torch.uint8), 9, torch.uint8),
        flat_part(7, numbers, 5, torch.int64),
        flat_part(8, small[:0], 0, torch.float32),
    ]


def test_gpu_digests_equal_the_cpus() -> None:
    sums = {}
    for device in ("cpu", "cuda"):
        digests = Digests(9, torch.device(device))
        digests.add(parts_on(device))
        sums[device] = digests.result()
    assert torch.equal(sums["cpu"], sums["cuda"])
    assert torch.equal(sums["cpu"][2], sums["cpu"][3])  # the cast is the one that travels
    assert sums["cpu"][:8].ne(0).all()
    assert sums["cpu"][8].eq(0).all()
