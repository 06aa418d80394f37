"""Host memory for copies from and to a GPU. All pinned memory that we allocate comes from this module.

Pinning is slow, and torch rounds every pinned allocation up to a power of two. So large buffers share slabs, and their
owner keeps them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30  # a power of two; a larger buffer gets its own slab
ALIGNMENT = 64


class HostBuffers:
    """Byte buffers of the given sizes, in this order. A slab is allocated when iteration reaches a buffer in it."""

    def __init__(self, sizes: Sequence[int], pinned: bool):
        self.sizes, self._pinned = list(sizes), pinned
        self._slabs: dict[int, Tensor] = {}
        self._slab_sizes: list[int] = []
        self._places = [(0, 0)] * len(sizes)  # (slab, offset in the slab) of each buffer
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            size = -(-sizes[index] // ALIGNMENT) * ALIGNMENT
            fitting = (slab for slab, used in enumerate(self._slab_sizes) if used + size <= SLAB_BYTES)
            slab = next(fitting, len(self._slab_sizes))
            if slab == len(self._slab_sizes):
                self._slab_sizes.append(0)
            self._places[index] = slab, self._slab_sizes[slab]
            self._slab_sizes[slab] += size

    def __iter__(self) -> Iterator[Tensor]:
        for size, (slab, start) in zip(self.sizes, self._places, strict=True):
            if slab not in self._slabs:
                self._slabs[slab] = torch.empty(self._slab_sizes[slab], dtype=torch.uint8, pin_memory=self._pinned)
            yield self._slabs[slab][start : start + size]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor without waiting for the work that is queued on the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
