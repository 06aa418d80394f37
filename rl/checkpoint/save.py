"""Save the training state in the background, on all nodes or on none.

    each rank: start() --> copy to the host --> write this rank's files --> [copy to the next node] --> FilesWritten
    leader:    all FilesWritten --> prepare() on every node --> commit() on every node --> remove() old steps

The next update waits for the copy to the host, but not for the files. No node renames a step's folder to its final name
before all nodes have written all files. No node writes COMMITTED before all folders have their final names. So after a
kill at any moment, either this step or the previous one is complete. Leftovers of a killed save have other names.
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from rl.checkpoint.directory import CheckpointDirectory
from rl.checkpoint.manifest import CheckpointError, File, Manifest, step_folder
from rl.checkpoint.snapshot import HostCopier, Snapshot
from rl.checkpoint.store import POLL_S, CheckpointStore
from rl.checkpoint.write import CheckpointWriter, RunDescription, StoredFile
from rl.common.events import write_event
from rl.placement.roles import Placement
from rl.watch.heart import OWN
from rl.watch.ledger import DISK, Awaited
from rl.world.faults import Stopped
from rl.world.messages import Letter, Mailbox, Message, waiting
from rl.world.world import World

EndAction = Literal["save and fail", "fail"]  # the actions of rl/world/orders.py with which a health rule ends the run
# What a main thread may report to wait for. The watchdog blames only ranks that wait for OWN work, such as a hung disk.
OWN_FILES, OTHERS_FILES, COMMIT = f"{OWN}checkpoint", "the others' checkpoints", f"{OWN}commit on all nodes"


@dataclass(frozen=True)
class FilesWritten(Message):
    """Tell the leader that a rank has written its files. The payload lists them, with the nodes that hold each."""

    step: int
    rank_state: dict[str, Any]
    awaited = Awaited("the other ranks' files of the checkpoint", DISK)


@dataclass(frozen=True)
class StepCommitted(Message):
    """Tell an actor that the step is committed on all nodes."""


@dataclass(frozen=True)
class StepJudged(Message):
    """Tell an actor how a health rule ends the run after this step, before the step is saved. None: it goes on."""

    end: EndAction | None
    awaited = Awaited("the leader's report of the step", "actor")


class SaveTimes(NamedTuple):
    """How long a save took, from its start to the commit on all nodes, and how long the loop waited for saves."""

    seconds: float
    blocked_s: float = 0.0


def receive_files(
    mail: Mailbox, actors: Sequence[int], step: int, num_nodes: int
) -> Iterator[tuple[Letter[FilesWritten], list[StoredFile]]]:
    """Yield one report of every actor. Raise for any other report: a step must not be committed without its files."""
    missing = set(actors)
    while missing:
        letter = mail.receive(FilesWritten)
        try:
            written = msgspec.msgpack.decode(letter.payload, type=list[StoredFile])
            if letter.source not in missing or letter.message.step != step:
                raise ValueError(f"step {step} is being saved, and ranks {sorted(missing)} have not reported yet")
            if any(node not in range(num_nodes) for _, nodes in written for node in nodes):
                raise ValueError(f"there are {num_nodes} nodes")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"rank {letter.source} sent an invalid report of its files of step {letter.message.step}: {error}"
            ) from None
        missing.remove(letter.source)
        yield letter, written


class Saver:
    """Save checkpoints on every actor rank, one at a time. A failure on any rank ends the world."""

    def __init__(self, world: World, placement: Placement, store: CheckpointStore, run: RunDescription, copies: int):
        self.is_owner, self.is_leader = world.rank in placement.owners, world.rank == placement.leader
        self.steps: set[int] = set()  # committed steps; only the leader adds new ones
        self._saved_at = 0.0  # Unix time of the newest save
        self._world, self._mail, self._placement = world, world.mail, placement
        self._store, self._run, self._copies = store, run, copies
        self._bases = msgspec.to_builtins(run.bases)
        self._writer = CheckpointWriter(store, placement, world.rank, run, copies)
        self._copier = HostCopier(world.device)
        self._work: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()  # (step, task)
        self._waits_for = OTHERS_FILES  # the reason that waiting threads report
        self._copied, self._idle = threading.Event(), threading.Event()
        self._copied.set()
        self._idle.set()
        self._has_warned_about_copies = False
        self._blocked_s = self._started_at = 0.0
        self._times: SaveTimes | None = None
        self._mail.on(StepCommitted, lambda letter: self._idle.set())
        threading.Thread(target=self._serve, name="checkpoint", daemon=True).start()

    def restore(self, steps: Iterable[int], saved_at: float) -> None:
        """Continue a run that has committed these steps, the newest of them at `saved_at`."""
        self.steps, self._saved_at = set(steps), saved_at

    def start(self, snapshot: Snapshot) -> None:
        """Start a save, which continues in the background."""
        assert self._idle.is_set(), "one save at a time"
        self._started_at = time.monotonic()
        self._copied.clear()
        self._idle.clear()
        self._work.put((snapshot.step, partial(self._save, snapshot, self._copier.record_event())))

    def add_probe(self, step: int, probe: dict[str, Tensor]) -> None:
        """Add logits to the checkpoint of this step after its commit. Called on the leader."""
        self._work.put((step, partial(self._writer.write_probe, step_folder(step), probe)))

    def wait_copied(self) -> None:
        """Wait until the learner's memory may change."""
        self._wait(self._copied)

    def wait_committed(self) -> None:
        """Wait until no save is in flight."""
        self._wait(self._idle)

    def share_end(self, end: EndAction | None) -> EndAction | None:
        """Return the leader's value on all actors, which call this at the same place in the loop."""
        if self.is_leader:
            for rank in self._placement.actors:
                self._mail.send(rank, StepJudged(end))
        return self._mail.receive(StepJudged).message.end

    def take_times(self) -> SaveTimes | None:
        """Return the times of the save that was committed since the last call, if there is one. Only on the leader."""
        taken, self._times = self._times, None
        if taken is not None:
            taken, self._blocked_s = taken._replace(blocked_s=self._blocked_s), 0.0
        return taken

    def wait_done(self) -> None:
        """Wait until everything requested so far is on disk."""
        self.wait_committed()
        done = threading.Event()
        self._work.put((0, done.set))
        self._wait(done)

    def stop(self, text: str, error: type[Exception] = Stopped) -> None:
        """End the run. The leader raises the error. The other ranks wait until that ends the world."""
        if self.is_leader:
            raise error(f"{text} (run.name={self._run.name})")
        self._wait(threading.Event())  # raises when the world ends

    def _wait(self, event: threading.Event) -> None:
        began = time.monotonic()
        while not event.is_set():
            with waiting(Awaited(what := self._waits_for, DISK)):
                while what == self._waits_for and not event.wait(POLL_S):
                    self._mail.check()
        self._blocked_s += time.monotonic() - began

    def _serve(self) -> None:
        while True:
            step, work = self._work.get()
            self._waits_for = OWN_FILES
            try:
                work()
            except BaseException as error:  # a run that cannot save must end, not continue silently
                self._world.faults.fail_in_background(error, "checkpoint", step)
                # Report first, then delete: the deletion may make other ranks of this node fail as well.
                shutil.rmtree(self._store.root / self._temporary(step), ignore_errors=True)
                return
            self._waits_for = OTHERS_FILES

    def _save(self, snapshot: Snapshot, ready: torch.cuda.Event | None) -> None:
        pieces = self._copier.copy([part.data for _, part in snapshot.parts], ready)
        self._copied.set()
        step = snapshot.step
        written = self._writer.write(self._temporary(step), self._save_id(step), snapshot, pieces)
        message = FilesWritten(step, snapshot.rank_state)
        self._mail.send(self._placement.leader, message, payload=msgspec.msgpack.encode(written))
        if self.is_leader:
            self._commit(snapshot)

    def _commit(self, snapshot: Snapshot) -> None:
        """Commit a step on all nodes. Called on the leader after it has written its own files."""
        self._waits_for = OTHERS_FILES
        store, step, save_id = self._store, snapshot.step, self._save_id(snapshot.step)
        files: list[File] = []
        ranks: dict[str, Any] = {}
        expected: list[dict[str, int]] = [{} for _ in store.node_leads]  # by node
        for letter, written in receive_files(self._mail, self._placement.actors, step, len(expected)):
            ranks[str(self._placement.actors.index(letter.source))] = letter.message.rank_state
            for file, nodes in written:
                files.append(replace(file, hosts=tuple(store.hosts[node] for node in nodes)))
                for node in nodes:
                    expected[node][file.name] = file.num_bytes
        self._waits_for = COMMIT
        manifest = self._manifest(snapshot, ranks, files).to_json()
        prepared = [
            store.call(rank, CheckpointDirectory.prepare, step, save_id, self._temporary(step), sizes, payload=manifest)
            for rank, sizes in zip(store.node_leads, expected, strict=True)
        ]
        renamed = [store.wait(future) for future in prepared]
        if not any(renamed):
            raise CheckpointError(f"no node could put {store.root / step_folder(step)} in place")
        store.call_all(CheckpointDirectory.commit, step, save_id)
        self.steps.add(step)
        old = sorted(self.steps - snapshot.steps_to_keep)
        if old:
            store.call_all(CheckpointDirectory.remove, save_id, old)
            self.steps -= set(old)
        write_event(store.root.parent, "checkpoint", step, f"step {step} is saved")
        self._warn_about_copies(files)
        self._times = SaveTimes(time.monotonic() - self._started_at)
        for rank in self._placement.actors:
            self._mail.send(rank, StepCommitted())

    def _manifest(self, snapshot: Snapshot, ranks: dict[str, Any], files: list[File]) -> Manifest:
        placement, store = self._placement, self._store
        hosts = [store.hosts[placement.nodes.node_of(rank)] for rank in range(placement.world_size)]
        # A resume takes the newest save, so the time must increase even if the clock was set back.
        self._saved_at = max(time.time(), self._saved_at + 1e-3)
        state = snapshot.state | {"actors": ranks} | ({"bases": self._bases} if self._bases else {})
        return Manifest(
            run_id=store.run_id,
            run_name=self._run.name,
            step=snapshot.step,
            save_id=self._save_id(snapshot.step),
            saved_at=self._saved_at,
            state=state,
            config=self._run.config,
            placement={"roles": placement.roles, "hosts": hosts, "owners": placement.owners, "folders": store.folders},
            files=tuple(sorted(files, key=lambda file: file.name)),
        )

    def _warn_about_copies(self, files: list[File]) -> None:
        if self._copies > 1 and not self._has_warned_about_copies and any(len(file.hosts) < 2 for file in files):
            self._has_warned_about_copies = True
            why = "there is one node" if self._placement.num_nodes == 1 else "all nodes see the same disk"
            print(f"oneworld: checkpoint.copies={self._copies}, but {why}: one copy is written", flush=True)

    def _save_id(self, step: int) -> str:
        return f"{self._world.id}-{step}"

    def _temporary(self, step: int) -> str:
        return f"{step_folder(step)}.tmp-{self._save_id(step)}"
