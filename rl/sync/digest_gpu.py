"""digest.py's sums on a GPU: one kernel for all parts, whatever their number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl.sync.digest import BLOCK, ELEMENT_SALT, SALTS, Part

PROGRAM_ELEMENTS = 1 << 14
STEP_ELEMENTS = 1 << 11


def add(sums: Tensor, parts: list[Part]) -> None:
    """Adds the digests of the parts to [num_tensors, 2] int32 `sums`."""
    kinds: dict[tuple[torch.dtype, bool], list[Part]] = {}
    for part in parts:
        if part.values.numel():
            assert part.values.stride(1) == 1 or part.values.shape[1] == 1
            is_cast = part.values.dtype != part.dtype
            kinds.setdefault((_loaded_as(part), is_cast), []).append(part)
    for (loaded_as, is_cast), alike in kinds.items():
        _launch(sums, alike, loaded_as, is_cast)


def _loaded_as(part: Part) -> torch.dtype:
    if part.values.dtype != part.dtype:
        assert (part.values.dtype, part.dtype) == (torch.float32, torch.bfloat16), (part.values.dtype, part.dtype)
        return torch.int32
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.dtype.itemsize]


def _launch(sums: Tensor, parts: list[Part], loaded_as: torch.dtype, is_cast: bool) -> None:
    rows = [
        (part.values.data_ptr(), part.values.stride(0), *part.values.shape, part.start, part.row_stride, part.tensor)
        for part in parts
    ]
    table = torch.tensor(rows, dtype=torch.int64)
    num_programs = (table[:, 2] * table[:, 3] + PROGRAM_ELEMENTS - 1) // PROGRAM_ELEMENTS
    part_of = torch.repeat_interleave(torch.arange(len(parts)), num_programs)
    chunk_of = torch.arange(len(part_of)) - (num_programs.cumsum(0) - num_programs)[part_of]
    table, programs = (
        host.pin_memory().to(sums.device, non_blocking=True) for host in (table, torch.stack([part_of, chunk_of]))
    )
    _add_digests[(programs.shape[1],)](
        sums,
        table,
        programs,
        programs.shape[1],
        _TYPES[loaded_as],
        is_cast,
        all(part.values.shape[0] == 1 for part in parts),
        PROGRAM_ELEMENTS,
        STEP_ELEMENTS,
        BLOCK,
        ELEMENT_SALT,
        *SALTS,
    )


_TYPES = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32}


@triton.jit
def _odd_hash(number, salt: tl.constexpr):
    mixed = number.to(tl.uint32) + salt
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = mixed ^ (mixed >> 15)
    mixed = (mixed ^ (mixed >> 16)) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    return mixed | 1


@triton.jit
def _add_digests(
    sums,
    table,
    programs,
    num_programs,
    loaded_as: tl.constexpr,
    is_cast: tl.constexpr,
    is_flat: tl.constexpr,
    program_elements: tl.constexpr,
    step_elements: tl.constexpr,
    block: tl.constexpr,
    element_salt: tl.constexpr,
    first_salt: tl.constexpr,
    second_salt: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + tl.load(programs + program) * 7
    base = tl.load(row).to(tl.pointer_type(loaded_as))
    memory_stride = tl.load(row + 1)
    num_rows = tl.load(row + 2)
    num_columns = tl.load(row + 3)
    start = tl.load(row + 4)
    row_stride = tl.load(row + 5)
    tensor = tl.load(row + 6)
    begin = tl.load(programs + num_programs + program) * program_elements
    first_sum = tl.zeros([step_elements], dtype=tl.uint32)
    second_sum = tl.zeros([step_elements], dtype=tl.uint32)
    for step in range(0, program_elements, step_elements):
        element = begin + step + tl.arange(0, step_elements)
        inside = element < num_rows * num_columns
        if is_flat:
            address = element
            position = start + element
        else:
            line = element // num_columns
            column = element % num_columns
            address = line * memory_stride + column
            position = start + line * row_stride + column
        value = tl.load(base + address, mask=inside, other=0)
        bits = value.to(tl.int32).to(tl.uint32, bitcast=True)
        if is_cast:  # float32 to bfloat16, to the nearest even, then widened with its sign
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            bits = (rounded.to(tl.int32, bitcast=True) >> 16).to(tl.uint32, bitcast=True)
        weighted = bits * _odd_hash(position % block, element_salt)
        number = position // block
        first_sum += weighted * _odd_hash(number, first_salt)
        second_sum += weighted * _odd_hash(number, second_salt)
    tl.atomic_add(sums + tensor * 2, tl.sum(first_sum).to(tl.int32, bitcast=True))
    tl.atomic_add(sums + tensor * 2 + 1, tl.sum(second_sum).to(tl.int32, bitcast=True))
