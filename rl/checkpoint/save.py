"""Saves the training state in the background: copied to the host, written, committed on all nodes or on none.

    save()            the next step's rollouts, ...                                the update waits for `copied`
      \\-- copy to the host --> write this rank's files, sync --> [copy to the next node] --> "saved" to the leader
    leader: all saved --> every node: prepare (manifest, final name) --> all prepared --> every node: commit --> prune

A step counts when one node has its COMMITTED marker, which none writes before all nodes have all of their files under
the final name. So a kill at any moment leaves either this step or the one before; leftovers have other names.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rl.checkpoint.manifest import File, Manifest, step_folder
from rl.checkpoint.shard_file import (
    Content,
    cannot_write,
    pieces_of,
    rows_to_write,
    sync_folder,
    write_shard,
    write_whole,
)
from rl.checkpoint.shelf import POLL_S, Shelf
from rl.checkpoint.snapshot import HostCopy
from rl.mail import Message
from rl.placement import Placement
from rl.shards import LocalSlice, TensorInfo
from rl.world import World

DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
HF_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
COPIES_IN_FLIGHT = 2
CAST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Record:
    """What every checkpoint of a run says about it."""

    run_id: str
    run_name: str
    config: dict[str, Any]
    model_folder: Path
    tensors: tuple[TensorInfo, ...]  # in the dtypes that are exported


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at the end of a step. Tensors are the learner's own memory until the host copy is taken."""

    step: int
    parts: Sequence[tuple[str, LocalSlice]]  # by kind: model, or the name of a moment
    ready: torch.cuda.Event | None
    rank_state: dict[str, Any]  # of this rank
    state: dict[str, Any]  # of the run
    steps_to_keep: frozenset[int]
    probe: dict[str, Tensor] | None = None  # the leader's


class Saver:
    """On every actor rank. At most one save is in flight; a failure of any rank's ends the world with the reason."""

    def __init__(self, world: World, placement: Placement, shelf: Shelf, record: Record, copies: int):
        self.steps: set[int] = set()  # that are committed
        self._world, self._mail, self._placement = world, world.mail, placement
        self._shelf, self._record, self._copies = shelf, record, copies
        self._host = HostCopy(world.device)
        self._snapshots: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self._saved: queue.SimpleQueue[Message] = queue.SimpleQueue()  # to the leader
        self._copied, self._idle = threading.Event(), threading.Event()
        self._copied.set()
        self._idle.set()
        self._told_about_copies = False
        self._mail.on("saved", self._saved.put)
        self._mail.on("committed", lambda message: self._idle.set())
        threading.Thread(target=self._serve, name="checkpoint", daemon=True).start()

    def mark(self) -> torch.cuda.Event | None:
        return self._host.mark()

    def start(self, snapshot: Snapshot) -> None:
        assert self._idle.is_set(), "one save at a time"
        self._copied.clear()
        self._idle.clear()
        self._snapshots.put(snapshot)

    def wait_copied(self) -> None:
        """Until the learner's memory may change."""
        self._wait(self._copied)

    def wait_committed(self) -> None:
        """Until nothing is in flight."""
        self._wait(self._idle)

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(POLL_S):
            self._mail.receive(timeout_s=0)  # raises when the world ends

    def _serve(self) -> None:
        while True:
            snapshot = self._snapshots.get()
            try:
                self._save(snapshot)
            except BaseException as error:  # whatever it was: the run must not go on unsaved without a word
                self._world.fail_in_background(error, "checkpoint", snapshot.step)
                return

    def _save(self, snapshot: Snapshot) -> None:
        pieces = self._host.take([part.data for _, part in snapshot.parts], snapshot.ready)
        self._copied.set()
        files = self._write(snapshot, pieces)
        meta = {"step": snapshot.step, "state": snapshot.rank_state}
        self._mail.send(self._placement.leader, "saved", meta, json.dumps([file.to_row() for file in files]).encode())
        if self._mail.rank == self._placement.leader:
            self._commit(snapshot)

    def _write(self, snapshot: Snapshot, pieces: list[list[Tensor]]) -> list[File]:
        """This rank's files: a shard where it is the owner, and the small ones where it is the leader."""
        folder = self._shelf.root / self._temporary(snapshot.step)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        files = []
        if self._mail.rank in self._placement.owners:
            files += self._write_shards(folder, snapshot, pieces)
        if self._mail.rank == self._placement.leader:
            files += self._write_small_files(folder, snapshot)
        sync_folder(folder)
        return [self._share(folder, file, snapshot.step) for file in files]

    def _write_shards(self, folder: Path, snapshot: Snapshot, pieces: list[list[Tensor]]) -> list[File]:
        shard, num_shards = self._placement.shard_of(self._mail.rank), len(self._placement.owners)
        exported = {info.name: info for info in self._record.tensors}
        model: list[Content] = []
        optimizer: list[Content] = []
        for (kind, part), flat in zip(snapshot.parts, pieces, strict=True):
            info = part.info
            first, end = info.rows(shard, num_shards)
            if first == end:
                continue
            contents = model if kind == "model" else optimizer
            wanted = exported[info.name] if kind == "model" else info
            rows = rows_to_write(kind, info.name, DTYPES[wanted.dtype], info.shape, first, end)
            contents.append(Content(rows, _bytes(flat, wanted.torch_dtype)))
            if wanted.dtype != info.dtype:
                rows = rows_to_write("master", info.name, DTYPES[info.dtype], info.shape, first, end)
                optimizer.append(Content(rows, _bytes(flat, info.torch_dtype)))
        about = {"run_id": self._record.run_id, "step": snapshot.step, "save_id": self._save_id(snapshot.step)}
        suffix = f"{shard:05d}-of-{num_shards:05d}.safetensors"
        return [
            write_shard(folder / f"model-{suffix}", model, about),
            write_shard(folder / f"optimizer-{suffix}", optimizer, about),
        ]

    def _write_small_files(self, folder: Path, snapshot: Snapshot) -> list[File]:
        hf = folder / "hf"
        hf.mkdir(exist_ok=True)
        files = []
        for path in sorted(path for pattern in HF_FILES for path in self._record.model_folder.glob(pattern)):
            if path.name.endswith(".index.json"):
                continue
            data = path.read_bytes()
            if path.name == "config.json":
                dtype = self._record.config["model"]["dtype"]
                data = json.dumps(json.loads(data) | {"dtype": dtype}, indent=2).encode()
            files.append(replace(write_whole(hf / path.name, data), name=f"hf/{path.name}"))
        sync_folder(hf)
        assert snapshot.probe is not None
        files.append(write_whole(folder / "probe.safetensors", safetensors.torch.save(snapshot.probe)))
        return files

    def _share(self, folder: Path, file: File, step: int) -> File:
        """The file with the hosts that hold it, after a copy to another node's disk where one is asked for."""
        hosts: tuple[str, ...] = (socket.gethostname(),)
        if self._copies > 1:
            for distance in range(1, self._placement.num_nodes):
                other = self._mail.rank + distance * self._placement.num_ranks_per_node
                host = self._send(other % self._placement.world_size, folder, file, step)
                if host:
                    hosts = (*hosts, host)
                    break
        return replace(file, hosts=hosts)

    def _send(self, rank: int, folder: Path, file: File, step: int) -> str:
        """To a rank of another node; returns its host, or nothing where that node sees this disk."""
        begin, host = 0, ""
        asked: list[Future[Message]] = []
        for piece in pieces_of(folder / file.name):
            meta = {"folder": self._temporary(step), "file": file.name, "begin": begin, "digest": file.digest}
            begin += len(piece)
            asked.append(self._shelf.call(rank, "put", piece, **meta, last=begin == file.num_bytes))
            if len(asked) == COPIES_IN_FLIGHT or begin == len(piece):
                answer = self._shelf.wait(asked.pop(0))
                if answer.meta["is_here"]:
                    return ""
                host = answer.meta["host"]
        for future in asked:
            self._shelf.wait(future)
        return host

    def _commit(self, snapshot: Snapshot) -> None:
        """On the leader, when it has written its own files."""
        files: list[File] = []
        ranks: dict[str, Any] = {}
        for _ in self._placement.actors:
            message = self._next_saved()
            assert message.meta["step"] == snapshot.step, message.meta
            ranks[str(self._placement.actors.index(message.source))] = message.meta["state"]
            files += [File.from_row(row) for row in json.loads(bytes(message.payload))]
        manifest = Manifest(
            run_id=self._record.run_id,
            run_name=self._record.run_name,
            step=snapshot.step,
            save_id=self._save_id(snapshot.step),
            saved_at=time.time(),
            state=snapshot.state | {"actors": ranks},
            config=self._record.config,
            placement=self._placement_record(),
            files=tuple(sorted(files, key=lambda file: file.name)),
        )
        meta: dict[str, Any] = {"step": snapshot.step, "save_id": manifest.save_id}
        self._shelf.ask_all("prepare", manifest.to_json(), folder=self._temporary(snapshot.step), **meta)
        self._shelf.ask_all("commit", **meta)
        self.steps.add(snapshot.step)
        old = sorted(self.steps - snapshot.steps_to_keep)
        if old:
            self._shelf.ask_all("remove", steps=old, **meta)
            self.steps -= set(old)
        self._tell_about_copies(manifest)
        for rank in self._placement.actors:
            self._mail.send(rank, "committed", {"step": snapshot.step})

    def _next_saved(self) -> Message:
        while True:
            try:
                return self._saved.get(timeout=POLL_S)
            except queue.Empty:
                self._mail.receive(timeout_s=0)

    def _tell_about_copies(self, manifest: Manifest) -> None:
        if self._copies > 1 and not self._told_about_copies and any(len(file.hosts) < 2 for file in manifest.files):
            self._told_about_copies = True
            why = "there is one node" if self._placement.num_nodes == 1 else "all nodes see the same disk"
            print(f"oneworld: checkpoint.copies={self._copies}, but {why}: one copy is written", flush=True)

    def _placement_record(self) -> dict[str, Any]:
        placement, per_node = self._placement, self._placement.num_ranks_per_node
        hosts = [self._shelf.hosts[rank // per_node] for rank in range(placement.world_size)]
        return {"roles": placement.roles, "hosts": hosts, "owners": placement.owners}

    def _save_id(self, step: int) -> str:
        return f"{self._world.id}-{step}"

    def _temporary(self, step: int) -> str:
        return f"{step_folder(step)}.tmp-{self._save_id(step)}"


def _bytes(pieces: Sequence[Tensor], dtype: torch.dtype) -> Iterator[memoryview]:
    """The elements' bytes in this dtype, cast a little at a time."""
    for piece in pieces:
        for part in (piece,) if piece.dtype == dtype else piece.split(CAST_ELEMENTS):
            yield part.to(dtype).view(torch.uint8).numpy().data
