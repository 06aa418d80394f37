"""Position-dependent digests of tensors, which add up: the digest of a tensor is the sum of those of its parts.

    digest(tensor) = sum over elements i of  bits(element i) * w(i mod 256) * m(i div 256)    modulo 2^32, for two m

Element i is counted in the whole tensor, row by row, wherever a part of it lies: in an actor's shard, in an engine's
fused or tensor-parallel parameter. All factors are odd, so a single wrong element never goes unnoticed; other errors
do with a chance of about 2^-32 when they lie within 256 elements, and 2^-64 otherwise.

On a CPU the sum over 256 elements is an integer matrix-vector product at the speed of memory; on a GPU one kernel
covers all parts of a bucket (digest_gpu.py).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 256  # elements that share a block factor
CHUNK = 1 << 22  # elements that are converted at a time, where their bits are not 32 wide
SALTS = (0x243F6A88, 0x85A308D3)  # of the two block factors
NUM_SUMS = len(SALTS)
ELEMENT_SALT = 0x13198A2E
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Part:
    """A [rows, columns] piece of a tensor: element (r, c) is number start + r * row_stride + c of the whole."""

    tensor: int
    values: Tensor
    start: int
    row_stride: int
    dtype: torch.dtype  # whose bits are meant; `values` may be wider, such as an actor's float32 masters


class Digests:
    """One digest for each of a list of tensors."""

    def __init__(self, num_tensors: int, device: torch.device):
        self._sums = torch.zeros(num_tensors, NUM_SUMS, dtype=torch.int32, device=device)

    def add(self, parts: list[Part]) -> None:
        parts = [_in_words(part) for part in parts]
        if self._sums.device.type == "cuda":
            from rl.sync import digest_gpu  # needs triton, which only GPU builds of torch bring

            digest_gpu.add(self._sums, parts)
            return
        for part in parts:
            self._sums[part.tensor] += digest_of(part)

    def result(self) -> Tensor:
        """[num_tensors, 2] int32, on the host."""
        return self._sums.cpu()


def flat_part(tensor: int, values: Tensor, start: int, dtype: torch.dtype) -> Part:
    """Consecutive elements of a tensor."""
    return Part(tensor, values.reshape(1, -1), start, 0, dtype)


def _in_words(part: Part) -> Part:
    """Elements of 64 bits count as two of 32."""
    if part.dtype.itemsize < 8:
        return part
    return Part(part.tensor, part.values.view(torch.int32), 2 * part.start, 2 * part.row_stride, torch.int32)


def digest_of(part: Part) -> Tensor:
    """[2] int32: the digest of one part, on the CPU."""
    num_rows, num_columns = part.values.shape
    if num_rows == 1:
        return _flat(part.values[0], part.start, part.dtype)
    whole_blocks = part.start % BLOCK == part.row_stride % BLOCK == num_columns % BLOCK == 0
    if not whole_blocks:
        return _scattered(part)
    sums = torch.zeros(NUM_SUMS, dtype=torch.int32)
    rows_at_once = max(1, CHUNK // num_columns)
    for row in range(0, num_rows, rows_at_once):
        bits = _bits(part.values[row : row + rows_at_once], part.dtype)
        first = (part.start + torch.arange(row, row + len(bits)) * part.row_stride) // BLOCK
        blocks = first.unsqueeze(1) + torch.arange(num_columns // BLOCK)
        partial = (bits.reshape(-1, BLOCK) @ _element_factors()).view_as(blocks)
        factors = _block_factors(int(blocks.max()) + 1)
        sums += torch.stack([(partial * factors[index][blocks]).sum() for index in range(NUM_SUMS)]).int()
    return sums


def _flat(values: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """Consecutive elements: a ragged head, whole blocks, a ragged tail."""
    head = min(-start % BLOCK, len(values))
    body = (len(values) - head) // BLOCK * BLOCK
    sums = torch.zeros(NUM_SUMS, dtype=torch.int32)
    for first, end in ((0, head), (head + body, len(values))):
        if first < end:
            sums += _scattered(Part(0, values[first:end].unsqueeze(0), start + first, 0, dtype))
    wide = dtype.itemsize == 4 and values.dtype.itemsize == 4
    at_once = body if wide and body else CHUNK
    for first in range(head, head + body, at_once):
        bits = _bits(values[first : min(first + at_once, head + body)], dtype)
        partial = bits.view(-1, BLOCK) @ _element_factors()
        block = (start + first) // BLOCK
        factors = _block_factors(block + len(partial))[:, block : block + len(partial)]
        sums += (partial * factors).sum(1).int()
    return sums


def _scattered(part: Part) -> Tensor:
    """Element by element; for what does not fall into whole blocks."""
    num_rows, num_columns = part.values.shape
    sums = torch.zeros(NUM_SUMS, dtype=torch.int32)
    rows_at_once = max(1, CHUNK // 8 // max(1, num_columns))
    for row in range(0, num_rows, rows_at_once):
        bits = _bits(part.values[row : row + rows_at_once], part.dtype)
        rows = torch.arange(row, row + len(bits)).unsqueeze(1)
        positions = part.start + rows * part.row_stride + torch.arange(num_columns)
        weighted = bits * _element_factors()[positions % BLOCK]
        blocks = positions // BLOCK
        factors = _block_factors(int(blocks.max()) + 1)
        sums += torch.stack([(weighted * factors[index][blocks]).sum() for index in range(NUM_SUMS)]).int()
    return sums


def _bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements in `dtype`, as int32."""
    return values.to(dtype).contiguous().view(INTEGERS[dtype.itemsize]).to(torch.int32)


def _odd_hash(numbers: Tensor, salt: int) -> Tensor:
    """Odd 32-bit factors; a multiply-and-shift mix that the GPU kernel repeats."""
    mask = 0xFFFFFFFF
    mixed = (numbers + salt) & mask
    for factor, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & mask
        mixed ^= mixed >> shift
    return (mixed | 1).to(torch.int32)


@lru_cache(maxsize=1)
def _element_factors() -> Tensor:
    return _odd_hash(torch.arange(BLOCK), ELEMENT_SALT)


_tables: list[Tensor] = []


def _block_factors(num_blocks: int) -> Tensor:
    """[2, at least num_blocks]; the table grows as it is needed."""
    if not _tables or _tables[0].shape[1] < num_blocks:
        size = 1 << max(12, num_blocks.bit_length())
        _tables[:] = [torch.stack([_odd_hash(torch.arange(size), salt) for salt in SALTS])]
    return _tables[0]
