"""One rank's files of a checkpoint: its shards from the host copy, the leader's small files, and copies of them all on
another node's disk."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rl.checkpoint.dtypes import NAMES
from rl.checkpoint.manifest import PROBE, File
from rl.checkpoint.shard_file import (
    Content,
    cannot_write,
    pieces_of,
    rows_to_write,
    sync_folder,
    write_shard,
    write_whole,
)
from rl.checkpoint.snapshot import Snapshot
from rl.checkpoint.store import MESSAGE_BYTES, CheckpointStore
from rl.model.shards import TensorInfo
from rl.placement.roles import Placement
from rl.watch.heart import HEART
from rl.world.mail import Message

HF_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
MESSAGES_IN_FLIGHT = 4
CAST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Record:
    """What every checkpoint of a run says about it."""

    run_name: str
    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]  # in the dtypes that are exported
    hf_files: dict[str, bytes]  # that make a model folder of merged weights


def read_hf_files(model_folder: Path, dtype: str) -> dict[str, bytes]:
    """Configs and tokenizer of a model whose weights are exported in this dtype."""
    paths = sorted(path for pattern in HF_FILES for path in model_folder.glob(pattern))
    files = {path.name: path.read_bytes() for path in paths if not path.name.endswith(".index.json")}
    config = json.loads(files["config.json"]) | {"dtype": dtype}
    return files | {"config.json": json.dumps(config, indent=2).encode()}


@dataclass(frozen=True)
class Written:
    """A file and the nodes that hold it."""

    file: File
    nodes: tuple[int, ...]


class Writer:
    def __init__(self, store: CheckpointStore, placement: Placement, rank: int, record: Record, copies: int):
        self._store, self._placement, self._rank = store, placement, rank
        self._record, self._copies = record, copies

    def write(self, folder: str, save_id: str, snapshot: Snapshot, pieces: Sequence[Sequence[Tensor]]) -> list[Written]:
        """This rank's files in the store's `folder`: a shard where it is an owner, those of hf/ where it leads.
        `pieces` are the host copies of the snapshot's parts."""
        path = self._store.root / folder
        files: list[File] = []
        try:
            path.mkdir(exist_ok=True)
            if self._rank in self._placement.owners:
                files += self._write_shards(path, save_id, snapshot, pieces)
            if self._rank == self._placement.leader:
                files += self._write_hf_files(path / "hf")
            sync_folder(path)
        except OSError as error:
            raise cannot_write(path, error) from error
        return [Written(file, self._copy(folder, file)) for file in files]

    def _write_shards(
        self, folder: Path, save_id: str, snapshot: Snapshot, pieces: Sequence[Sequence[Tensor]]
    ) -> list[File]:
        shard, num_shards = self._placement.shard_of(self._rank), len(self._placement.owners)
        exported = {info.name: info for info in self._record.tensors}
        model: list[Content] = []
        optimizer: list[Content] = []
        for (kind, part), flat in zip(snapshot.parts, pieces, strict=True):
            info = part.info
            first, end = info.rows(shard, num_shards)
            if first == end:
                continue
            contents = model if kind == "model" else optimizer
            wanted = exported[info.name].torch_dtype if kind == "model" else info.torch_dtype
            rows = rows_to_write(kind, info.name, NAMES[wanted], info.shape, first, end)
            contents.append(Content(rows, _bytes(flat, wanted)))
            if wanted != info.torch_dtype:
                rows = rows_to_write("master", info.name, NAMES[info.torch_dtype], info.shape, first, end)
                optimizer.append(Content(rows, _bytes(flat, info.torch_dtype)))
        about = {"run_id": self._store.run_id, "step": snapshot.step, "save_id": save_id}
        suffix = f"{shard:05d}-of-{num_shards:05d}.safetensors"
        return [
            write_shard(folder / f"model-{suffix}", model, about),
            write_shard(folder / f"optimizer-{suffix}", optimizer, about),
        ]

    def _write_hf_files(self, folder: Path) -> list[File]:
        folder.mkdir(exist_ok=True)
        written = [write_whole(folder / name, data) for name, data in self._record.hf_files.items()]
        sync_folder(folder)
        return [replace(file, name=f"{folder.name}/{file.name}") for file in written]

    def write_probe(self, folder: str, probe: dict[str, Tensor]) -> None:
        """Into a step that is committed; where it is no longer kept there is nothing to do."""
        path = self._store.root / folder / PROBE
        part = path.with_suffix(".part")
        if not path.parent.is_dir() or path.exists():
            return
        try:
            part.unlink(missing_ok=True)  # of a kill
            file = write_whole(part, safetensors.torch.save(probe))
            part.rename(path)
            sync_folder(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._copy(folder, replace(file, name=PROBE))

    def _copy(self, folder: str, file: File) -> tuple[int, ...]:
        """To the next node with a disk of its own, where a second copy is asked for; returns the nodes that have it."""
        num_nodes, per_node = self._placement.num_nodes, self._placement.num_ranks_per_node
        own, place = divmod(self._rank, per_node)
        for distance in range(1, num_nodes if self._copies > 1 else 1):
            node = (own + distance) % num_nodes
            if self._send(node * per_node + place, folder, file):
                return own, node
        return (own,)

    def _send(self, rank: int, folder: str, file: File) -> bool:
        """False where that rank sees the same disk, and has the file already."""
        begin = 0
        asked: list[Future[Message]] = []
        for piece in pieces_of(self._store.root / folder / file.name, MESSAGE_BYTES):
            is_first, end = begin == 0, begin + len(piece)
            meta = {"folder": folder, "file": file.name, "begin": begin, "digest": file.digest}
            asked.append(self._store.call(rank, "put", piece, **meta, last=end == file.num_bytes))
            begin = end
            HEART.touch_background()
            is_due = is_first or len(asked) == MESSAGES_IN_FLIGHT
            if is_due and self._store.wait(asked.pop(0)).meta["is_here"]:
                return False
        for future in asked:
            self._store.wait(future)
        return True


def _bytes(pieces: Sequence[Tensor], dtype: torch.dtype) -> Iterator[memoryview]:
    """The elements' bytes in this dtype, cast a little at a time."""
    for piece in pieces:
        for part in (piece,) if piece.dtype == dtype else piece.split(CAST_ELEMENTS):
            yield part.to(dtype).view(torch.uint8).numpy().data
