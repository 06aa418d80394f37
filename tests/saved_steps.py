"""Checkpoints on the disks of several nodes, for tests of resuming."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.checkpoint.manifest import File, Manifest
from rl.checkpoint.resume import find_checkpoint
from rl.checkpoint.shard_file import Content, rows_to_write, write_shard, write_small_file
from rl.checkpoint.store import CheckpointStore
from rl.model.shards import TensorInfo

DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}


HOSTS = ("n0", "n1", "n2")


LONG_AGO = 1_000_000_000.0


W = TensorInfo("w", (7, 3), "float32", sharded=True)


BIAS = TensorInfo("bias", (2,), "float32", sharded=True)


TABLE = TensorInfo("table", (4, 2), "float32", sharded=False)


COUNT = TensorInfo("count", (), "int64", sharded=False)


MODEL = (W, BIAS, TABLE, COUNT)


MOMENTS = ("exp_avg", "exp_avg_sq")


Values = dict[tuple[str, str], Tensor]  # by kind and name


def values_of(infos: Sequence[TensorInfo], kinds: Sequence[str] = ("model", *MOMENTS)) -> Values:
    """Numbers that are nowhere else: no element of one tensor is in another."""
    made, start = {}, 0.0
    for kind in kinds:
        for info in infos:
            if kind == "model" or info.dtype != "int64":
                made[kind, info.name] = (start + torch.arange(info.num_elements)).view(info.shape).to(info.torch_dtype)
                start += info.num_elements
    return made


def rows_of(whole: Tensor, info: TensorInfo, shard: int, num_shards: int) -> Tensor:
    """A rank's memory, as torch itself would cut it."""
    if not info.sharded:
        return whole
    chunks = whole.chunk(num_shards)
    return chunks[shard] if shard < len(chunks) else whole[:0]


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_files(folder: Path, infos: Sequence[TensorInfo], values: Values, shard: int, num_shards: int) -> list[File]:
    """One rank's shards, of the rows that it owns: of a replicated tensor the first rank's."""
    by_name = {info.name: info for info in infos}
    contents: dict[str, list[Content]] = {"model": [], "optimizer": []}
    for (kind, name), whole in values.items():
        info = by_name[name]
        rows = rows_of(whole, info, shard, num_shards)
        if not rows.numel() or (shard and not info.sharded):
            continue
        first, end = info.rows(shard, num_shards)
        part = rows_to_write(kind, name, DTYPES[str(whole.dtype)[6:]], info.shape, first, end)
        contents["model" if kind == "model" else "optimizer"].append(Content(part, [as_bytes(rows)]))
    suffix = f"{shard:05d}-of-{num_shards:05d}.safetensors"
    return [write_shard(folder / f"{file}-{suffix}", parts, {}) for file, parts in contents.items()]


def save(
    roots: Sequence[Path],
    step: int,
    infos: Sequence[TensorInfo] = MODEL,
    values: Values | None = None,
    num_shards: int = 2,
    copies: int = 1,
    committed: Sequence[int] | None = None,
    small: Sequence[File] = (),
    **fields: Any,
) -> Manifest:
    """A checkpoint on these nodes' disks: shard r lies on node r modulo their number, and with two copies on the next
    node too; `committed` are the nodes that have the marker. `small` files are in the manifest alone."""
    values = values_of(infos) if values is None else values
    files: list[File] = []
    folders = [root / f"step_{step}" for root in roots]
    for folder in folders:
        folder.mkdir(parents=True)
    for shard in range(num_shards):
        nodes = sorted({(shard + distance) % len(roots) for distance in range(copies)})
        for node in nodes:
            written = write_files(folders[node], infos, values, shard, num_shards)
        hosts = tuple(HOSTS[node] for node in nodes)
        files += [File(file.name, file.num_bytes, file.digest, hosts, file.slices) for file in written]
    record = {"run_id": "r1", "run_name": "first", "save_id": f"w1-{step}", "saved_at": LONG_AGO + step} | fields
    record = {"config": {}, "placement": {}} | record
    state = {"version": step + 1, "origin": "", "best": None} | record.pop("state", {})
    manifest = Manifest(**record, step=step, state=state, files=(*files, *small))
    for node, folder in enumerate(folders):
        write_small_file(folder / "manifest.json", manifest.to_json())
        if committed is None or node in committed:
            write_small_file(folder / "COMMITTED", b"")
    return manifest


OpenStores = Callable[..., list[CheckpointStore]]


def found_step(store: CheckpointStore, resume: str = "auto") -> int | None:
    found = find_checkpoint(store, resume)
    return None if found is None else found.manifest.step


def lose(root: Path, step: int, shard: str = "model-00000-of-00002") -> None:
    """A file of the step: it was killed while it was saved, or the disk lost it."""
    (root / f"step_{step}" / f"{shard}.safetensors").unlink()
