"""Digests of tensors. A digest depends on every bit and its position, and the digests of parts add up.

A digest is two numbers modulo 2^32. The sum of the digests of what several owners sent can be compared with the digest
of what a receiver got, and with that of an engine's fused or tensor-parallel parameters. Both sides must cut the
tensor into the same parts. On a CPU, the digest of a part is XXH3 of its bytes, seeded with its position. On a GPU it
is a weighted sum that one kernel computes for any number of parts (digest_gpu.py).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

NUM_SUMS = 2
CAST_ELEMENTS = 1 << 22  # elements that are cast at a time, if the digest needs another dtype


@dataclass(frozen=True)
class TensorPart:
    """A [rows, columns] part of a tensor. Its element (r, c) has the flat index start + r * row_stride + c there."""

    tensor: int  # index into the list of tensors
    values: Tensor
    start: int
    row_stride: int
    dtype: torch.dtype  # values are cast to it before hashing: an actor's masters may be float32


def flat_part(tensor: int, values: Tensor, start: int, dtype: torch.dtype) -> TensorPart:
    return TensorPart(tensor, values.reshape(1, -1), start, 0, dtype)


class Digests:
    def __init__(self, num_tensors: int, device: torch.device):
        self._sums = torch.zeros(num_tensors, NUM_SUMS, dtype=torch.int32, device=device)

    def add(self, parts: Sequence[TensorPart]) -> None:
        if self._sums.device.type == "cuda":
            from rl.sync import digest_gpu  # needs triton, which only GPU builds of torch bring

            digest_gpu.add(self._sums, parts)
            return
        sums = self._sums.numpy()  # adding two numbers to a tensor takes longer than hashing a small part
        for part in parts:
            if part.values.numel():
                sums[part.tensor] += digest_of(part)

    def copy(self, others: "Digests", tensors: Collection[int]) -> None:
        """Take over the digests of these tensors."""
        rows = sorted(tensors)
        self._sums[rows] = others._sums[rows]

    def result(self) -> Tensor:
        """Return the digests, [num_tensors, 2] int32 on the host."""
        return self._sums.cpu()

    def to_bytes(self) -> bytes:
        return self.result().numpy().tobytes()


def digest_of(part: TensorPart) -> np.ndarray:
    hasher = xxhash.xxh3_64(seed=part.start)
    is_plain = part.values.dtype == part.dtype and part.values.is_contiguous()
    for row in (part.values,) if is_plain else part.values:
        pieces = (row,) if row.dtype == part.dtype else row.split(CAST_ELEMENTS)
        for piece in pieces:
            hasher.update(piece.to(part.dtype).contiguous().view(torch.uint8).numpy().data)
    return np.frombuffer(hasher.digest(), dtype=np.int32)
