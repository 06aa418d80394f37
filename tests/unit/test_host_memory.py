"""Host buffers: their sizes and alignment, and the slabs that they share."""

import pytest
import torch
from torch import Tensor

from rl.model import host_memory
from rl.model.host_memory import HostBuffers


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 8192)


def slab_sizes(buffers: list[Tensor]) -> list[int]:
    slabs = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
    return sorted(slabs.values())


def test_buffers_share_slabs_that_are_nearly_full() -> None:
    """Alone, each would be rounded up to a power of two: 2048 bytes for 1200."""
    sizes = [*[1200] * 20, 4, 0, 16384]  # the last is larger than a slab
    buffers = list(HostBuffers(sizes, pinned=False))
    assert [buffer.nbytes for buffer in buffers] == sizes
    slabs = slab_sizes(buffers)
    assert slabs == [2 * 1216, 6 * 1216, 6 * 1216, 6 * 1216 + 64, 16384]
    assert sum(1 << (size - 1).bit_length() for size in slabs) < 1.2 * sum(sizes)


def test_buffers_are_aligned_and_do_not_overlap() -> None:
    buffers = list(HostBuffers([3, 100, 64, 8192, 65], pinned=False))
    for number, buffer in enumerate(buffers):
        assert buffer.storage_offset() % 64 == 0
        buffer.fill_(number)
    for number, buffer in enumerate(buffers):
        assert torch.equal(buffer, torch.full_like(buffer, number))


def test_the_same_memory_is_given_every_time() -> None:
    buffers = HostBuffers([100, 9000, 100], pinned=False)
    assert [buffer.data_ptr() for buffer in buffers] == [buffer.data_ptr() for buffer in buffers]


def test_a_slab_is_allocated_when_its_first_buffer_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a thread that copies into them can report progress between two slow allocations."""
    allocated: list[int] = []
    empty = torch.empty

    def count(size: int, **options: object) -> Tensor:
        allocated.append(size)
        return empty(size, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", count)
    buffers = iter(HostBuffers([8192, 4096, 4096], pinned=False))
    assert allocated == []
    next(buffers)
    assert allocated == [8192]
    next(buffers), next(buffers)
    assert allocated == [8192, 8192]
