"""Saves the training state in the background: copied to the host, written, committed on all nodes or on none.

    start()           the next step's rollouts, ...                                the update waits for `copied`
      \\-- copy to the host --> write this rank's files, sync --> [copy to the next node] --> "saved" to the leader
    leader: all saved --> every node: prepare (manifest, final name) --> all prepared --> every node: commit --> prune

No node gives a step its final name before all nodes have all of their files, and none writes COMMITTED before all have
the final name. So a kill at any moment leaves either this step or the one before; leftovers have other names.
"""

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl.checkpoint.manifest import CheckpointError, File, Manifest, step_folder
from rl.checkpoint.snapshot import HostCopy, Snapshot
from rl.checkpoint.store import POLL_S, CheckpointStore
from rl.checkpoint.write import Record, Writer
from rl.placement.roles import Placement
from rl.watch.heart import OWN
from rl.world.faults import Stopped
from rl.world.mail import Message, waiting
from rl.world.world import World

# What a main thread may wait for, so that the rank is blamed whose disk hangs, and no other.
OWN_FILES, OTHERS_FILES, COMMIT = f"{OWN}checkpoint", "the others' checkpoints", f"{OWN}commit on all nodes"


class Saver:
    """On every actor rank. At most one save is in flight; a failure of any rank's ends the world with the reason."""

    def __init__(self, world: World, placement: Placement, store: CheckpointStore, record: Record, copies: int):
        self.is_owner, self.is_leader = world.rank in placement.owners, world.rank == placement.leader
        self.steps: set[int] = set()  # that are committed; the leader's
        self.saved_at = 0.0  # the newest of them
        self._world, self._mail, self._placement = world, world.mail, placement
        self._store, self._record, self._copies = store, record, copies
        self._writer = Writer(store, placement, world.rank, record, copies)
        self._host = HostCopy(world.device)
        self._work: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()  # step, what to do
        self._saved: queue.SimpleQueue[Message] = queue.SimpleQueue()  # to the leader
        self._waits_for = OTHERS_FILES  # whoever waits for a save now
        self._copied, self._idle = threading.Event(), threading.Event()
        self._copied.set()
        self._idle.set()
        self._told_about_copies = False
        self._mail.on("saved", self._saved.put)
        self._mail.on("committed", lambda message: self._idle.set())
        threading.Thread(target=self._serve, name="checkpoint", daemon=True).start()

    def mark(self) -> torch.cuda.Event | None:
        """What the copy must wait for on the device."""
        return self._host.mark()

    def start(self, snapshot: Snapshot) -> None:
        assert self._idle.is_set(), "one save at a time"
        self._copied.clear()
        self._idle.clear()
        self._work.put((snapshot.step, partial(self._save, snapshot)))

    def add_probe(self, step: int, probe: dict[str, Tensor]) -> None:
        """On the leader: logits for the checkpoint of this step, to be written when it is committed."""
        self._work.put((step, partial(self._writer.write_probe, step_folder(step), probe)))

    def wait_copied(self) -> None:
        """Until the learner's memory may change."""
        self._wait(self._copied)

    def wait_committed(self) -> None:
        """Until no save is in flight."""
        self._wait(self._idle)

    def wait_done(self) -> None:
        """Until all that was asked for so far is on the disk."""
        self.wait_committed()
        done = threading.Event()
        self._work.put((0, done.set))
        self._wait(done)

    def stop(self, text: str) -> None:
        """Ends the run. The leader says so, when its own files are complete; the others wait for the verdict."""
        if self.is_leader:
            raise Stopped(f"{text} (run.name={self._record.run_name})")
        self._mail.receive()

    def _wait(self, event: threading.Event) -> None:
        while not event.is_set():
            with waiting(what := self._waits_for):
                while what == self._waits_for and not event.wait(POLL_S):
                    self._mail.receive(timeout_s=0)  # raises when the world ends

    def _serve(self) -> None:
        while True:
            step, work = self._work.get()
            self._waits_for = OWN_FILES
            try:
                work()
            except BaseException as error:  # whatever it was: the run must not go on unsaved without a word
                self._world.faults.fail_in_background(error, "checkpoint", step)
                # Then: others of this node that still write there fail by it, and must not be heard first.
                shutil.rmtree(self._store.root / self._temporary(step), ignore_errors=True)
                return
            self._waits_for = OTHERS_FILES

    def _save(self, snapshot: Snapshot) -> None:
        pieces = self._host.take([part.data for _, part in snapshot.parts], snapshot.ready)
        self._copied.set()
        step = snapshot.step
        written = self._writer.write(self._temporary(step), self._save_id(step), snapshot, pieces)
        meta = {"step": step, "state": snapshot.rank_state, "nodes": [entry.nodes for entry in written]}
        rows = json.dumps([entry.file.to_row() for entry in written]).encode()
        self._mail.send(self._placement.leader, "saved", meta, rows)
        if self.is_leader:
            self._commit(snapshot)

    def _commit(self, snapshot: Snapshot) -> None:
        """On the leader, when it has written its own files."""
        self._waits_for = OTHERS_FILES
        files: list[File] = []
        ranks: dict[str, Any] = {}
        expected: list[dict[str, int]] = [{} for _ in self._store.node_leads]  # by node: the files that lie there
        for _ in self._placement.actors:
            message = self._next_saved()
            assert message.meta["step"] == snapshot.step, message.meta
            ranks[str(self._placement.actors.index(message.source))] = message.meta["state"]
            for row, nodes in zip(json.loads(message.payload), message.meta["nodes"], strict=True):
                file = File.from_row(row)
                files.append(replace(file, hosts=tuple(self._store.hosts[node] for node in nodes)))
                for node in nodes:
                    expected[node][file.name] = file.num_bytes
        self._waits_for = COMMIT
        manifest = self._manifest(snapshot, ranks, files)
        meta: dict[str, Any] = {"step": snapshot.step, "save_id": manifest.save_id}
        folder = self._temporary(snapshot.step)
        answers = self._store.ask_all("prepare", manifest.to_json(), folder=folder, expected=expected, **meta)
        if not any(answer.meta["claimed"] for answer in answers):
            raise CheckpointError(f"no node could put {self._store.root / step_folder(snapshot.step)} in place")
        self._store.ask_all("commit", **meta)
        self.steps.add(snapshot.step)
        old = sorted(self.steps - snapshot.steps_to_keep)
        if old:
            self._store.ask_all("remove", steps=old, **meta)
            self.steps -= set(old)
        self._tell_about_copies(files)
        for rank in self._placement.actors:
            self._mail.send(rank, "committed", {"step": snapshot.step})

    def _manifest(self, snapshot: Snapshot, ranks: dict[str, Any], files: list[File]) -> Manifest:
        placement = self._placement
        hosts = [self._store.hosts[rank // placement.num_ranks_per_node] for rank in range(placement.world_size)]
        return Manifest(
            run_id=self._store.run_id,
            run_name=self._record.run_name,
            step=snapshot.step,
            save_id=self._save_id(snapshot.step),
            saved_at=self._next_time(),
            state=snapshot.state | {"actors": ranks},
            config=self._record.config,
            placement={
                "roles": placement.roles,
                "hosts": hosts,
                "owners": placement.owners,
                "folders": self._store.folders,
            },
            files=tuple(sorted(files, key=lambda file: file.name)),
        )

    def _next_time(self) -> float:
        """Later than any before in this run, also where the leader's clock is not: the newest is found by it."""
        self.saved_at = max(time.time(), self.saved_at + 1e-3)
        return self.saved_at

    def _next_saved(self) -> Message:
        while True:
            try:
                return self._saved.get(timeout=POLL_S)
            except queue.Empty:
                self._mail.receive(timeout_s=0)

    def _tell_about_copies(self, files: list[File]) -> None:
        if self._copies > 1 and not self._told_about_copies and any(len(file.hosts) < 2 for file in files):
            self._told_about_copies = True
            why = "there is one node" if self._placement.num_nodes == 1 else "all nodes see the same disk"
            print(f"oneworld: checkpoint.copies={self._copies}, but {why}: one copy is written", flush=True)

    def _save_id(self, step: int) -> str:
        return f"{self._world.id}-{step}"

    def _temporary(self, step: int) -> str:
        return f"{step_folder(step)}.tmp-{self._save_id(step)}"
