"""Write one rank's files of a checkpoint: its shards, the leader's small files, and their copies on another node."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rl.checkpoint import shard_file
from rl.checkpoint.directory import CheckpointDirectory
from rl.checkpoint.manifest import GROUPS, MERGE_RECORD, PROBE, TORCH_DTYPES, File, Slice
from rl.checkpoint.snapshot import Snapshot
from rl.checkpoint.store import MESSAGE_BYTES, CheckpointStore
from rl.common.bars import BARS
from rl.model.adapter_names import is_adapter
from rl.model.base_digest import BaseDigests
from rl.model.shards import TensorInfo
from rl.placement.roles import Placement
from rl.watch.heart import HEART

HF_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
MESSAGES_IN_FLIGHT = 4
CAST_ELEMENTS = 1 << 22  # elements that are cast at a time
FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
Pieces = Sequence[Sequence[Tensor]]  # the host copies of a snapshot's parts
StoredFile = tuple[File, tuple[int, ...]]  # a file and the nodes that hold it


@dataclass(frozen=True)
class RunDescription:
    """Facts about a run that each of its checkpoints stores."""

    name: str
    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]  # in the dtypes of the merged model
    hf_files: dict[str, bytes]  # config and tokenizer files of the merged model
    bases: dict[str, BaseDigests] = field(default_factory=dict)  # of adapters, by the kind of their weights


def read_hf_files(model_folder: Path, dtype: str) -> dict[str, bytes]:
    """Return the config and tokenizer files of a model, which may be a merged one. The config gets this dtype."""
    paths = sorted(path for pattern in HF_FILES for path in model_folder.glob(pattern))
    kept = [path for path in paths if not path.name.endswith(".index.json") and path.name != MERGE_RECORD]
    files = {path.name: path.read_bytes() for path in kept}
    config = json.loads(files["config.json"]) | {"dtype": dtype}
    return files | {"config.json": json.dumps(config, indent=2).encode()}


class CheckpointWriter:
    """Write one rank's files into the store's directory, on `copies` nodes if there are enough disks."""

    def __init__(self, store: CheckpointStore, placement: Placement, rank: int, run: RunDescription, copies: int):
        self.rank, self._store, self._placement = rank, store, placement
        self._run, self._copies = run, copies

    def write(self, folder: str, save_id: str, snapshot: Snapshot, pieces: Pieces) -> list[StoredFile]:
        """Write this rank's files into `folder` of the store: owners write shards, actors that hold groups write them,
        and the leader also writes hf/."""
        path = self._store.root / folder
        files: list[File] = []
        with shard_file.writing(path):
            path.mkdir(exist_ok=True)
            if self.rank in self._placement.owners:
                files += self._write_shards(path, save_id, snapshot, pieces)
            if snapshot.write_groups is not None:
                files.append(self._write_groups(path, snapshot.write_groups()))
            if self.rank == self._placement.leader:
                (path / "hf").mkdir(exist_ok=True)
                for name, data in self._run.hf_files.items():
                    files.append(replace(shard_file.write_small_file(path / "hf" / name, data), name=f"hf/{name}"))
                shard_file.sync_folder(path / "hf")
            shard_file.sync_folder(path)
        return [(file, self._copy(folder, file)) for file in files]

    def _write_shards(self, folder: Path, save_id: str, snapshot: Snapshot, pieces: Pieces) -> list[File]:
        shard, num_shards = self._placement.shard_of(self.rank), len(self._placement.owners)
        exported = {info.name: info.dtype for info in self._run.tensors}
        contents: dict[str, list[shard_file.Content]] = {"model": [], "optimizer": []}
        for (kind, part), flat in zip(snapshot.parts, pieces, strict=True):
            info = part.info
            first, end = info.rows(shard, num_shards)
            is_exported = kind == "model" and not is_adapter(info.name)
            dtypes = {kind: exported[info.name] if is_exported else info.dtype}
            if dtypes[kind] != info.dtype:
                dtypes["master"] = info.dtype
            for stored, dtype in dtypes.items() if first < end else ():
                rows = shard_file.rows_to_write(stored, info.name, FILE_DTYPES[dtype], info.shape, first, end)
                content = shard_file.Content(rows, _bytes(flat, getattr(torch, dtype)))
                contents["model" if stored == "model" else "optimizer"].append(content)
        about = {"run_id": self._store.run_id, "step": snapshot.step, "save_id": save_id}
        suffix = f"{shard:05d}-of-{num_shards:05d}.safetensors"
        num_bytes = sum(content.part.num_bytes for held in contents.values() for content in held)
        with BARS.open(f"checkpoint {snapshot.step}", num_bytes, "B") as count:
            files = {name: folder / f"{name}-{suffix}" for name in contents}
            return [shard_file.write_shard(files[name], held, about, count) for name, held in contents.items()]

    def _write_groups(self, folder: Path, data: bytes) -> File:
        """Write this actor's groups. The manifest lists the file as one slice, so that it is read as slices are."""
        actors = self._placement.actors
        name = f"{GROUPS}-{actors.index(self.rank):05d}-of-{len(actors):05d}.safetensors"
        file, size = shard_file.write_small_file(folder / name, data), (len(data),)
        whole = Slice(GROUPS, name, "U8", size, (0,), size, 0, len(data), file.digest)
        return replace(file, slices=(whole,))

    def write_probe(self, folder: str, probe: dict[str, Tensor]) -> None:
        """Write logits into a committed step, unless the step has been deleted."""
        path = self._store.root / folder / PROBE
        part = path.with_suffix(".part")
        if not path.parent.is_dir() or path.exists():
            return
        with shard_file.writing(path):
            part.unlink(missing_ok=True)  # left by a kill
            file = shard_file.write_small_file(part, safetensors.torch.save(probe))
            shard_file.rename_durably(part, path)
        self._copy(folder, replace(file, name=PROBE))

    def _copy(self, folder: str, file: File) -> tuple[int, ...]:
        """Copy a file to the next node with another disk, if two copies are wanted. Return the nodes that hold it."""
        nodes = self._placement.nodes
        own, place = nodes.node_of(self.rank), self.rank - nodes.lead_of(self.rank)
        for distance in range(1, nodes.num_nodes if self._copies > 1 else 1):
            node = (own + distance) % nodes.num_nodes
            receivers = nodes.ranks_of(node)  # a smaller node has no rank at the same place
            if self.send_file(receivers[place % len(receivers)], folder, file):
                return own, node
        return (own,)

    def send_file(self, rank: int, folder: str, file: File) -> bool:
        """Send a file to a rank. Return False if that rank shares the disk, and so has the file already."""
        begin = 0
        pending: list[Future[bool]] = []
        for piece in shard_file.pieces_of(self._store.root / folder / file.name, MESSAGE_BYTES):
            is_first, is_last = begin == 0, begin + len(piece) == file.num_bytes
            write = CheckpointDirectory.write
            pending.append(self._store.call(rank, write, folder, file.name, begin, file.digest, is_last, payload=piece))
            begin += len(piece)
            HEART.touch_background()
            must_wait = is_first or len(pending) == MESSAGES_IN_FLIGHT
            if must_wait and not self._store.wait(pending.pop(0)):
                return False
        for future in pending:
            self._store.wait(future)
        return True


def _bytes(pieces: Sequence[Tensor], dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of the elements, cast to this dtype."""
    for piece in pieces:
        for part in (piece,) if piece.dtype == dtype else piece.split(CAST_ELEMENTS):
            yield part.to(dtype).view(torch.uint8).numpy().data
