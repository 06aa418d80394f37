"""Digests on a GPU: one kernel handles any number of parts at memory bandwidth.

    digest = sum over elements i of  mix(bits of element i) * w(i mod 256) * m(i div 256)    modulo 2^32, for two m

Here i is an element's index in the whole tensor. `mix` is a bijection in which every bit, including the sign, affects
the low half. w and m are odd and pseudo-random. So one wrong element always changes the digest. Several wrong elements
leave it unchanged with a probability of about 2^-32 if they lie in the same 256 elements, and 2^-64 otherwise.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl.sync.digest import TensorPart

BLOCK = tl.constexpr(256)
# Blocks per program of the kernel, and per step of its loop. Tuned on an H200, as NUM_WARPS is.
PROGRAM_BLOCKS, STEP_BLOCKS = tl.constexpr(256), tl.constexpr(4)
NUM_WARPS = 2
TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
FLAT, WHOLE_BLOCKS = tl.constexpr(1), tl.constexpr(2)  # in any other layout, each element's position is computed
ELEMENT_SALT, FIRST_SALT, SECOND_SALT = (tl.constexpr(salt) for salt in (0x13198A2E, 0x243F6A88, 0x85A308D3))


def add(sums: Tensor, parts: Sequence[TensorPart]) -> None:
    """Add the digests of the parts to `sums`, [num_tensors, 2] int32."""
    kinds: dict[tuple[int, bool, int], list[TensorPart]] = {}
    for part in map(_in_words, parts):
        if part.values.numel():
            assert part.values.stride(1) == 1 or part.values.shape[1] == 1
            is_cast = part.values.dtype != part.dtype
            assert not is_cast or (part.values.dtype, part.dtype) == (torch.float32, torch.bfloat16), part.dtype
            kinds.setdefault((part.values.dtype.itemsize, is_cast, _layout(part)), []).append(part)
    for kind, alike in kinds.items():
        _launch(sums, alike, *kind)


def _in_words(part: TensorPart) -> TensorPart:
    if part.dtype.itemsize < 8:
        return part
    return TensorPart(part.tensor, part.values.view(torch.int32), 2 * part.start, 2 * part.row_stride, torch.int32)


def _layout(part: TensorPart) -> int:
    """Return how the part is aligned with the 256-element blocks of the whole tensor."""
    num_rows, num_columns = part.values.shape
    if part.start % BLOCK.value == 0 and num_rows == 1:
        return FLAT.value
    bounds = (part.start, part.row_stride, num_columns)
    return 0 if any(bound % BLOCK.value for bound in bounds) else WHOLE_BLOCKS.value


def _launch(sums: Tensor, parts: list[TensorPart], itemsize: int, is_cast: bool, layout: int) -> None:
    rows = [
        (part.values.data_ptr(), part.values.stride(0), *part.values.shape, part.start, part.row_stride, part.tensor)
        for part in parts
    ]
    table = torch.tensor(rows, dtype=torch.int64).to(sums.device, non_blocking=True)
    program_elements = PROGRAM_BLOCKS.value * BLOCK.value
    num_programs = triton.cdiv(max(part.values.numel() for part in parts), program_elements)
    grid = (len(parts), num_programs)
    _add_digests[grid](sums, table, TYPES[itemsize], is_cast, layout, num_warps=NUM_WARPS)


@triton.jit
def _odd_hash(number, salt: tl.constexpr):
    mixed = number.to(tl.uint32) + salt
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return (mixed ^ (mixed >> 16)) | 1


@triton.jit
def _add_digests(sums, table, loaded_as: tl.constexpr, is_cast: tl.constexpr, layout: tl.constexpr):
    row = table + tl.program_id(0) * 7
    base = tl.load(row).to(tl.pointer_type(loaded_as))
    memory_stride = tl.load(row + 1)
    num_rows = tl.load(row + 2)
    num_columns = tl.load(row + 3)
    start = tl.load(row + 4)
    row_stride = tl.load(row + 5)
    tensor = tl.load(row + 6)
    begin = tl.program_id(1).to(tl.int64) * PROGRAM_BLOCKS
    if begin * BLOCK >= num_rows * num_columns:  # every part gets as many programs as the largest one
        return
    place = tl.arange(0, BLOCK)[None, :]
    first_sum = tl.zeros([STEP_BLOCKS, BLOCK], dtype=tl.uint32)
    second_sum = tl.zeros([STEP_BLOCKS, BLOCK], dtype=tl.uint32)
    for step in range(0, PROGRAM_BLOCKS, STEP_BLOCKS):
        number = begin + step + tl.arange(0, STEP_BLOCKS)[:, None]
        if layout == FLAT:
            line = tl.zeros_like(number)
            column = number * BLOCK + place
            position_block = start // BLOCK + number
            position_place = place
        elif layout == WHOLE_BLOCKS:  # one division for 256 elements
            blocks_in_row = num_columns // BLOCK
            line = number // blocks_in_row
            column = (number % blocks_in_row) * BLOCK + place
            position_block = (start + line * row_stride) // BLOCK + number % blocks_in_row
            position_place = place
        else:
            element = number * BLOCK + place
            line = element // num_columns
            column = element % num_columns
            position = start + line * row_stride + column
            position_block = position // BLOCK
            position_place = position % BLOCK
        inside = (line < num_rows) & (column < num_columns)
        bits = tl.load(base + line * memory_stride + column, mask=inside, other=0)
        bits = bits.to(tl.int32).to(tl.uint32, bitcast=True)
        if is_cast:  # round float32 to bfloat16, ties to even, then sign-extend
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF0000, rounded)  # NaN
            bits = (rounded.to(tl.int32, bitcast=True) >> 16).to(tl.uint32, bitcast=True)
        mixed = (bits ^ (bits >> 16)) * 0x9E3779B1
        weighted = (mixed ^ (mixed >> 15)) * _odd_hash(position_place, ELEMENT_SALT)
        first_sum += weighted * _odd_hash(position_block, FIRST_SALT)
        second_sum += weighted * _odd_hash(position_block, SECOND_SALT)
    tl.atomic_add(sums + tensor * 2, tl.sum(tl.sum(first_sum, 1), 0).to(tl.int32, bitcast=True))
    tl.atomic_add(sums + tensor * 2 + 1, tl.sum(tl.sum(second_sum, 1), 0).to(tl.int32, bitcast=True))
