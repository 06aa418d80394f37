"""Save the training state in the background, on all nodes or on none.

    start()           the next step's rollouts, ...                              the update waits for the host copy
      \\-- copy to the host --> write this rank's files, sync --> [copy to the next node] --> FilesWritten to the leader
    leader: all written --> every node: PrepareStep --> all prepared --> every node: CommitStep --> RemoveSteps

No node gives a step its final name before all nodes have all of their files, and none writes COMMITTED before all have
the final name. So a kill at any moment leaves either this step or the one before. Leftovers have other names.
"""

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl.checkpoint.manifest import CheckpointError, File, Manifest, step_folder
from rl.checkpoint.snapshot import HostCopy, Snapshot
from rl.checkpoint.store import POLL_S, CheckpointStore, CommitStep, PrepareStep, RemoveSteps
from rl.checkpoint.write import CheckpointWriter, RunDescription
from rl.placement.roles import Placement
from rl.watch.heart import OWN
from rl.world.faults import Stopped
from rl.world.messages import Letter, Message, waiting
from rl.world.world import World

# What a main thread may wait for. The watchdog blames the rank whose own disk hangs, and no other.
OWN_FILES, OTHERS_FILES, COMMIT = f"{OWN}checkpoint", "the others' checkpoints", f"{OWN}commit on all nodes"


@dataclass(frozen=True)
class FilesWritten(Message):
    """Tell the leader that a rank has written its files. The payload lists them in JSON."""

    step: int
    rank_state: dict[str, Any]
    nodes: list[tuple[int, ...]]  # for each file, the nodes that hold it


@dataclass(frozen=True)
class StepCommitted(Message):
    step: int


class Saver:
    """Save checkpoints on every actor rank, one at a time. A failure on any rank ends the world with the reason."""

    def __init__(self, world: World, placement: Placement, store: CheckpointStore, run: RunDescription, copies: int):
        self.is_owner, self.is_leader = world.rank in placement.owners, world.rank == placement.leader
        self.steps: set[int] = set()  # committed ones; known to the leader
        self.saved_at = 0.0  # when the newest of them was saved
        self._world, self._mail, self._placement = world, world.mail, placement
        self._store, self._run, self._copies = store, run, copies
        self._writer = CheckpointWriter(store, placement, world.rank, run, copies)
        self._host = HostCopy(world.device)
        self._work: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()  # step, what to do
        self._written: queue.SimpleQueue[Letter[FilesWritten]] = queue.SimpleQueue()  # on the leader
        self._waits_for = OTHERS_FILES  # what a thread that waits for a save waits for
        self._copied, self._idle = threading.Event(), threading.Event()
        self._copied.set()
        self._idle.set()
        self._has_warned_about_copies = False
        self._mail.on(FilesWritten, self._written.put)
        self._mail.on(StepCommitted, lambda letter: self._idle.set())
        threading.Thread(target=self._serve, name="checkpoint", daemon=True).start()

    def mark(self) -> torch.cuda.Event | None:
        """Return the event on the device that the host copy must wait for."""
        return self._host.mark()

    def start(self, snapshot: Snapshot) -> None:
        assert self._idle.is_set(), "one save at a time"
        self._copied.clear()
        self._idle.clear()
        self._work.put((snapshot.step, partial(self._save, snapshot)))

    def add_probe(self, step: int, probe: dict[str, Tensor]) -> None:
        """Write logits to the checkpoint of this step when it is committed. Called on the leader."""
        self._work.put((step, partial(self._writer.write_probe, step_folder(step), probe)))

    def wait_copied(self) -> None:
        """Wait until the learner's memory may change."""
        self._wait(self._copied)

    def wait_committed(self) -> None:
        """Wait until no save is in flight."""
        self._wait(self._idle)

    def wait_done(self) -> None:
        """Wait until everything requested so far is on disk."""
        self.wait_committed()
        done = threading.Event()
        self._work.put((0, done.set))
        self._wait(done)

    def stop(self, text: str) -> None:
        """End the run. The leader decides it when its own files are complete; the other ranks wait for that."""
        if self.is_leader:
            raise Stopped(f"{text} (run.name={self._run.name})")
        self._wait(threading.Event())  # ends with the world

    def _wait(self, event: threading.Event) -> None:
        while not event.is_set():
            with waiting(what := self._waits_for):
                while what == self._waits_for and not event.wait(POLL_S):
                    self._mail.check()

    def _serve(self) -> None:
        while True:
            step, work = self._work.get()
            self._waits_for = OWN_FILES
            try:
                work()
            except BaseException as error:  # the run must not continue unsaved without a word
                self._world.faults.fail_in_background(error, "checkpoint", step)
                # Deleted last: other ranks of this node may fail because of it, and their errors must not come first.
                shutil.rmtree(self._store.root / self._temporary(step), ignore_errors=True)
                return
            self._waits_for = OTHERS_FILES

    def _save(self, snapshot: Snapshot) -> None:
        pieces = self._host.take([part.data for _, part in snapshot.parts], snapshot.ready)
        self._copied.set()
        step = snapshot.step
        written = self._writer.write(self._temporary(step), self._save_id(step), snapshot, pieces)
        message = FilesWritten(step, snapshot.rank_state, [stored.nodes for stored in written])
        rows = json.dumps([stored.file.to_row() for stored in written]).encode()
        self._mail.send(self._placement.leader, message, payload=rows)
        if self.is_leader:
            self._commit(snapshot)

    def _commit(self, snapshot: Snapshot) -> None:
        """Commit a step on all nodes. Called on the leader after it has written its own files."""
        self._waits_for = OTHERS_FILES
        files: list[File] = []
        ranks: dict[str, Any] = {}
        expected: list[dict[str, int]] = [{} for _ in self._store.node_leads]  # by node
        for _ in self._placement.actors:
            letter = self._next_written()
            message = letter.message
            assert message.step == snapshot.step, message
            ranks[str(self._placement.actors.index(letter.source))] = message.rank_state
            for row, nodes in zip(json.loads(letter.payload), message.nodes, strict=True):
                file = File.from_row(row)
                files.append(replace(file, hosts=tuple(self._store.hosts[node] for node in nodes)))
                for node in nodes:
                    expected[node][file.name] = file.num_bytes
        self._waits_for = COMMIT
        manifest = self._manifest(snapshot, ranks, files)
        step, save_id = snapshot.step, manifest.save_id
        prepare = PrepareStep(step, save_id, self._temporary(step), expected)
        answers = self._store.call_all(prepare, manifest.to_json())
        if not any(answer.message.took_effect for answer in answers):
            raise CheckpointError(f"no node could put {self._store.root / step_folder(step)} in place")
        self._store.call_all(CommitStep(step, save_id))
        self.steps.add(step)
        old = sorted(self.steps - snapshot.steps_to_keep)
        if old:
            self._store.call_all(RemoveSteps(save_id, old))
            self.steps -= set(old)
        self._warn_about_copies(files)
        for rank in self._placement.actors:
            self._mail.send(rank, StepCommitted(step))

    def _manifest(self, snapshot: Snapshot, ranks: dict[str, Any], files: list[File]) -> Manifest:
        placement = self._placement
        hosts = [self._store.hosts[rank // placement.num_ranks_per_node] for rank in range(placement.world_size)]
        return Manifest(
            run_id=self._store.run_id,
            run_name=self._run.name,
            step=snapshot.step,
            save_id=self._save_id(snapshot.step),
            saved_at=self._next_time(),
            state=snapshot.state | {"actors": ranks},
            config=self._run.config,
            placement={
                "roles": placement.roles,
                "hosts": hosts,
                "owners": placement.owners,
                "folders": self._store.folders,
            },
            files=tuple(sorted(files, key=lambda file: file.name)),
        )

    def _next_time(self) -> float:
        """Return a time later than all before in this run, even if the clock went back: it tells the newest save."""
        self.saved_at = max(time.time(), self.saved_at + 1e-3)
        return self.saved_at

    def _next_written(self) -> Letter[FilesWritten]:
        while True:
            try:
                return self._written.get(timeout=POLL_S)
            except queue.Empty:
                self._mail.check()

    def _warn_about_copies(self, files: list[File]) -> None:
        if self._copies > 1 and not self._has_warned_about_copies and any(len(file.hosts) < 2 for file in files):
            self._has_warned_about_copies = True
            why = "there is one node" if self._placement.num_nodes == 1 else "all nodes see the same disk"
            print(f"oneworld: checkpoint.copies={self._copies}, but {why}: one copy is written", flush=True)

    def _save_id(self, step: int) -> str:
        return f"{self._world.id}-{step}"

    def _temporary(self, step: int) -> str:
        return f"{step_folder(step)}.tmp-{self._save_id(step)}"
