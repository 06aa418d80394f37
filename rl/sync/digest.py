"""Digests of tensors that depend on every bit and its place, and that add up over parts.

A digest is two numbers modulo 2^32. The digest of a tensor is the sum of the digests of its parts, each of which
depends on its place in the whole. So what several owners sent can be compared with what a receiver received, and that
with what lies in an engine's fused or tensor-parallel parameters, as long as both sides cut the tensor alike.

On a CPU a part's digest is XXH3 of its bytes, seeded with its place: as fast as reading them. On a GPU, where no such
hash exists, it is a sum that one kernel computes for any number of parts (digest_gpu.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

NUM_SUMS = 2
CAST_ELEMENTS = 1 << 22  # cast at a time, if the digest is of another dtype


@dataclass(frozen=True)
class TensorPart:
    """A [rows, columns] piece of a tensor: element (r, c) is number start + r * row_stride + c of the whole."""

    tensor: int
    values: Tensor
    start: int
    row_stride: int
    dtype: torch.dtype  # that the digest is of; `values` may be wider, such as an actor's float32 masters


def flat_part(tensor: int, values: Tensor, start: int, dtype: torch.dtype) -> TensorPart:
    """Return consecutive elements of a tensor as a part."""
    return TensorPart(tensor, values.reshape(1, -1), start, 0, dtype)


class Digests:
    """One digest for each of a list of tensors."""

    def __init__(self, num_tensors: int, device: torch.device):
        self._sums = torch.zeros(num_tensors, NUM_SUMS, dtype=torch.int32, device=device)

    def add(self, parts: Sequence[TensorPart]) -> None:
        if self._sums.device.type == "cuda":
            from rl.sync import digest_gpu  # needs triton, which only GPU builds of torch bring

            digest_gpu.add(self._sums, parts)
            return
        for part in parts:
            if part.values.numel():
                self._sums[part.tensor] += digest_of(part)

    def result(self) -> Tensor:
        """Return the digests, [num_tensors, 2] int32 on the host."""
        return self._sums.cpu()


def digest_of(part: TensorPart) -> Tensor:
    """Return the digest of one part, [2] int32, computed on the CPU."""
    hasher = xxhash.xxh3_64(seed=part.start)
    for row in part.values:
        pieces = (row,) if row.dtype == part.dtype else row.split(CAST_ELEMENTS)
        for piece in pieces:
            hasher.update(piece.to(part.dtype).contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(hasher.digest()), dtype=torch.int32)
