"""Plan a merge: check that the slices of every tensor cover it, and assign the tensors to output files.

This module only computes a plan from a manifest. It reads and writes no files.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl.checkpoint.manifest import ITEM_BYTES, CheckpointError, File, Manifest, Slice
from rl.checkpoint.shard_file import pack_header

FLOATS = ("F32", "F16", "BF16")
Box = tuple[tuple[int, int], ...]  # (first, end) along each dimension


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of the merged model, and the slices that hold each of its elements once."""

    name: str
    dtype: str  # in the output file
    shape: tuple[int, ...]
    slices: tuple[tuple[File, Slice], ...]
    begin: int = 0  # first byte in the output file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file to write."""

    name: str
    header: bytes
    tensors: tuple[MergedTensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def read_tensors(manifest: Manifest, dtype: str | None) -> list[MergedTensor]:
    """Return the model's tensors in the order of the model. `dtype` replaces the dtype of floating-point tensors."""
    found = manifest.slices("model")
    if not found:
        raise CheckpointError(f"the manifest of step {manifest.step} lists no slices of a model, so it is incomplete")
    tensors: list[MergedTensor] = []
    problems: list[str] = []
    for name, pieces in found.items():
        first = pieces[0][1]
        wanted = dtype if dtype and first.dtype in FLOATS else first.dtype
        try:
            tensors.append(MergedTensor(name, wanted, first.shape, tuple(_select_cover(pieces))))
        except CheckpointError as error:
            problems.append(f"\n  {name} {list(first.shape)}: {error}")
    if problems:
        raise CheckpointError(
            f"the manifest of step {manifest.step} of {manifest.run_name} is incomplete; nothing was merged:"
            + "".join(problems)
        )
    return tensors


def _select_cover(pieces: Sequence[tuple[File, Slice]]) -> list[tuple[File, Slice]]:
    """Return slices that hold each element of a tensor exactly once. Use the first of several replicas."""
    whole = pieces[0][1]
    left: list[Box] = [tuple((0, length) for length in whole.shape)]  # not covered yet
    taken: dict[Box, tuple[File, Slice]] = {}
    for file, part in sorted(pieces, key=lambda piece: piece[1].offsets):  # sorted, so that `left` stays short
        if (part.dtype, part.shape) != (whole.dtype, whole.shape):
            raise CheckpointError(
                f"{file.name} holds a slice of {part.dtype} {list(part.shape)}, {pieces[0][0].name} one of "
                f"{whole.dtype} {list(whole.shape)}"
            )
        box = box_of(part)
        if part.num_bytes != math.prod(part.size) * ITEM_BYTES[part.dtype] or not _is_inside(box, whole.shape):
            raise CheckpointError(f"{file.name} holds a slice {_text(box)} that does not fit into it")
        if math.prod(part.size) == 0:
            continue
        if box in taken:
            other, twin = taken[box]
            if twin.digest != part.digest:
                raise CheckpointError(f"{_text(box)} differs between its replicas in {other.name} and {file.name}")
            continue
        uncovered = sum(volume(intersect(box, hole)) for hole in left)
        if uncovered != math.prod(part.size):
            raise CheckpointError(f"{_text(box)} of {file.name} overlaps with another slice")
        left = [rest for hole in left for rest in _subtract(hole, box)]
        taken[box] = (file, part)
    left = [hole for hole in left if volume(hole)]
    if left:
        raise CheckpointError(f"no file holds {', '.join(map(_text, left))}")
    return [taken[box] for box in sorted(taken)]


def box_of(part: Slice) -> Box:
    return tuple((first, first + length) for first, length in zip(part.offsets, part.size, strict=True))


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return all(0 <= first <= end <= length for (first, end), length in zip(box, shape, strict=True))


def intersect(one: Box, other: Box) -> Box:
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True))


def volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def _subtract(hole: Box, box: Box) -> list[Box]:
    """Return the part of `hole` outside `box`, as boxes."""
    common = intersect(hole, box)
    if not volume(common):
        return [hole]
    rest: list[Box] = []
    for dim, ((first, end), (low, high)) in enumerate(zip(hole, common, strict=True)):
        before, after = common[:dim], hole[dim + 1 :]
        rest += [(*before, side, *after) for side in ((first, low), (high, end)) if side[0] < side[1]]
    return rest


def _text(box: Box) -> str:
    return f"[{', '.join(f'{first}:{end}' for first, end in box)}]"


def lay_out(tensors: Sequence[MergedTensor], max_bytes: int) -> list[OutputFile]:
    """Assign tensors to files with at most `max_bytes` of tensors each. A larger tensor gets a file of its own."""
    groups: list[list[MergedTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if groups[-1] and num_bytes + tensor.num_bytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.num_bytes
    if len(groups) == 1:
        return [_output("model.safetensors", groups[0])]
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return [_output(name, group) for name, group in zip(names, groups)]


def _output(name: str, tensors: Sequence[MergedTensor]) -> OutputFile:
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])  # for alignment
    entries = [(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in ordered]
    header = pack_header({"format": "pt"}, entries)
    begins = itertools.accumulate((tensor.num_bytes for tensor in ordered), initial=len(header))
    return OutputFile(name, header, tuple(replace(tensor, begin=begin) for tensor, begin in zip(ordered, begins)))


def index_of(outputs: Sequence[OutputFile]) -> bytes:
    """Return the content of model.safetensors.index.json."""
    total = sum(tensor.num_bytes for output in outputs for tensor in output.tensors)
    places = {tensor.name: output.name for output in outputs for tensor in output.tensors}
    return json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2
    ).encode()
