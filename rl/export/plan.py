"""Plan a merge: check that the slices of every tensor cover it, and assign the tensors to output files.

This module only computes a plan from a manifest. It reads and writes no files. A slice is always a range of rows,
because FSDP cuts tensors along their first dimension.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl.checkpoint.manifest import ITEM_BYTES, CheckpointError, File, Manifest, Slice
from rl.checkpoint.shard_file import pack_header

FLOATS = ("F32", "F16", "BF16")
BASE = "base"  # the kind of the slices that lie in the files of a base model, not in a shard


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of the merged model, and the ranges of its rows that the shards hold, in order."""

    name: str
    dtype: str  # in the output file
    shape: tuple[int, ...]
    slices: tuple[tuple[File, Slice], ...]
    begin: int = 0  # first byte in the output file
    trained_as: str = ""  # dtype to which the run rounded the stored values; empty if they are what it had
    delta: "Delta | None" = None  # to add to the values

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Delta:
    """What the adapters of a layer add to its weight: scale x B x A."""

    a: MergedTensor  # [rank, columns]
    b: MergedTensor  # [rows, rank]
    scale: float


@dataclass(frozen=True)
class OutputFile:
    name: str
    header: bytes
    tensors: tuple[MergedTensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def read_tensors(manifest: Manifest, dtype: str | None) -> list[MergedTensor]:
    """Return the saved tensors in the order of the model: its weights, or its adapters if only they are trained.
    `dtype` replaces the dtype of floating-point tensors."""
    found, title = manifest.slices("model"), f"step {manifest.step} of {manifest.run_name}"
    if not found:
        raise CheckpointError(f"the manifest of {title} lists no slices of a model, so it is incomplete")
    tensors, problems = [], []
    for name, pieces in found.items():
        first = pieces[0][1]
        wanted = dtype if dtype and first.dtype in FLOATS else first.dtype
        try:
            tensors.append(MergedTensor(name, wanted, first.shape, tuple(_select_cover(pieces))))
        except CheckpointError as error:
            problems.append(f"\n  {name} {list(first.shape)}: {error}")
    if problems:
        raise CheckpointError(f"the manifest of {title} is incomplete; nothing was merged:{''.join(problems)}")
    return tensors


def _select_cover(pieces: Sequence[tuple[File, Slice]]) -> list[tuple[File, Slice]]:
    """Return slices that hold each row of a tensor exactly once, in order. Use the first of several replicas."""
    owner, whole = pieces[0]
    num_rows = whole.shape[0] if whole.shape else 1
    taken: list[tuple[File, Slice]] = []
    holes: list[str] = []
    covered = 0
    for file, part in sorted(pieces, key=lambda piece: _rows(piece[1])):
        if (part.dtype, part.shape) != (whole.dtype, whole.shape):
            raise CheckpointError(
                f"{file.name} holds a slice of {part.dtype} {list(part.shape)}, {owner.name} one of "
                f"{whole.dtype} {list(whole.shape)}"
            )
        first, end = _rows(part)
        is_inside = 0 <= first <= end <= num_rows and part.size[1:] == part.shape[1:]
        if not is_inside or part.num_bytes != math.prod(part.size) * ITEM_BYTES[part.dtype]:
            raise CheckpointError(
                f"{file.name} holds a slice {list(part.size)} at {list(part.offsets)} that is not a range of its rows"
            )
        if not part.num_bytes:
            continue
        if taken and _rows(taken[-1][1]) == (first, end):
            twin, replica = taken[-1]
            if replica.digest != part.digest:
                raise CheckpointError(f"rows {first}:{end} differ between the replicas in {twin.name} and {file.name}")
            continue
        if first < covered:
            raise CheckpointError(f"rows {first}:{end} of {file.name} overlap with another slice")
        if first > covered:
            holes.append(f"{covered}:{first}")
        taken.append((file, part))
        covered = end
    if covered < num_rows:
        holes.append(f"{covered}:{num_rows}")
    if holes and math.prod(whole.shape) > 0:
        raise CheckpointError(f"no file holds rows {', '.join(holes)}")
    return taken


def _rows(part: Slice) -> tuple[int, int]:
    """Return the first row of a slice and the one after its last. A scalar is one row."""
    return (part.offsets[0], part.offsets[0] + part.size[0]) if part.shape else (0, 1)


def lay_out(tensors: Sequence[MergedTensor], max_bytes: int) -> list[OutputFile]:
    """Assign tensors to files with at most `max_bytes` of tensors each. A larger tensor gets a file of its own."""
    groups: list[list[MergedTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    return [lay_out_file(name, group) for name, group in zip(names, groups)]


def lay_out_file(name: str, tensors: Sequence[MergedTensor]) -> OutputFile:
    """Give each tensor its place in a file."""
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])  # for alignment
    entries = [(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in ordered]
    header = pack_header({"format": "pt"}, entries)
    begins = itertools.accumulate((tensor.num_bytes for tensor in ordered), initial=len(header))
    return OutputFile(name, header, tuple(replace(tensor, begin=begin) for tensor, begin in zip(ordered, begins)))


def index_of(outputs: Sequence[OutputFile]) -> bytes:
    """Return the content of model.safetensors.index.json."""
    total = sum(tensor.num_bytes for output in outputs for tensor in output.tensors)
    places = {tensor.name: output.name for output in outputs for tensor in output.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2).encode()
