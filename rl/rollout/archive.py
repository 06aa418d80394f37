"""Groups in files, between the phases rollout and update.

    phase rollout    engine's lead --file--> disk of its node, and --ScoredGroup--> leader
    phase update     disks of all nodes --GroupFile--> leader --ScoredGroup--> the actor that owns the group

An engine's lead writes each group when it is finished (`GroupRecorder`). At the start of either phase, the leader
gathers the files that exist on any node (`gather_files`). From then on they stand in for engines: a task whose group is
stored is answered from the file (`ArchiveDispatcher`). So the schedule, the owners of the groups and the metrics are
those of a run that samples and trains at once.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl.common.text import count_of
from rl.data.batch import Batch
from rl.data.trajectories import Provenance, Trajectory, compare_provenance, read_provenance, write_trajectory
from rl.data.trajectory_files import GroupKey, list_files, trajectory_folder
from rl.placement.roles import Placement
from rl.rollout.dispatch import BatchTime, Dispatcher, Task
from rl.rollout.service import ScoredGroup
from rl.rollout.use import EngineUse
from rl.watch.heart import HEART
from rl.world.messages import Letter, Mailbox, Message

PROGRESS_S = 30.0  # between two lines of the console about the progress of a phase rollout


@dataclass(frozen=True)
class FindGroups(Message):
    """Tell every rank which groups are needed, and what they must come from. The first rank of each node looks for
    them on its disk. In the phase rollout, the leads of engines write such groups."""

    step: int
    provenance: Provenance
    is_done: bool = False  # the phase has nothing left to do, so no groups are needed
    awaited = "the leader to say which groups are needed"


@dataclass(frozen=True)
class FoundFile:
    """A file of a group on the disk of a node. It can be used if it has neither differences nor damage."""

    round: int
    number: int
    path: str
    differences: list[str]  # of its provenance
    damage: str  # why it cannot be read; empty: it can

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.round, self.number)


@dataclass(frozen=True)
class GroupsFound(Message):
    """Tell the leader which files of groups are on the disk of a node."""

    files: list[FoundFile]
    awaited = "the nodes' lists of sampled groups"


@dataclass(frozen=True)
class SendGroups(Message):
    """Tell a node which of the files that it has listed to send to the leader."""

    places: list[int]  # in its list
    awaited = "the leader's choice of sampled groups"


@dataclass(frozen=True)
class GroupFile(Message):
    """Send a file to the leader, as payload. An empty payload means that it cannot be read any more."""

    place: int  # in the list of this node
    awaited = "sampled groups from the nodes"


@dataclass(frozen=True)
class GroupWritten(Message):
    """Tell the leader that a group is in its file."""

    num_tokens: int


@dataclass(frozen=True)
class StoredFile:
    """A file that the leader has gathered."""

    path: str
    data: bytes | bytearray


class GroupRecorder:
    """Write the groups of one engine, on its lead."""

    def __init__(self, mail: Mailbox, leader: int, run: Path, order: FindGroups):
        """`run` is the folder of the run on this node."""
        self._mail, self._leader, self._order = mail, leader, order
        self._folder = trajectory_folder(run, order.step)

    def record(self, task: Task, group: ScoredGroup, rollouts: Batch) -> None:
        key = GroupKey(task.round, task.prompt.number)
        numbers = (group.num_preemptions, group.num_kept_tokens, group.num_read_tokens, group.num_cached_tokens)
        trajectory = Trajectory(rollouts, group.scores, group.engine, *numbers)
        write_trajectory(self._folder, key, trajectory, self._order.step, self._order.provenance)
        self._mail.send(self._leader, GroupWritten(int(rollouts.loss_mask.sum())))


class ArchiveDispatcher:
    """Answer tasks with stored groups, on the leader. Engines sample those of the others that `samples` accepts. The
    owner of a group that is neither stored nor sampled is told that it is missing."""

    def __init__(
        self,
        mail: Mailbox,
        engines: Dispatcher,
        groups: Mapping[GroupKey, Trajectory],
        samples: Callable[[int], bool],
    ):
        self._mail, self._engines, self._groups, self._samples = mail, engines, groups, samples
        self._round, self._shown_at = 0, time.monotonic()
        self._resampled: set[int] = set()  # groups that engines sample now; files of later rounds do not continue these
        self._lock = threading.Lock()
        # Groups of the rounds so far: from files, sampled now, tokens of the latter, missing, and left to sample.
        self.num_stored = self.num_written = self.num_tokens = self.num_missing = self.num_asked = 0
        mail.on(GroupWritten, self._on_written)

    def open(self, tasks: Sequence[Task]) -> None:
        if any(task.prompt.number < 0 for task in tasks):  # an evaluation
            self._engines.open(tasks)
            return
        self._round += 1
        asked = []
        for task in tasks:
            number = task.prompt.number
            stored = self._groups.get(GroupKey(self._round, number))
            if stored is not None and number not in self._resampled:
                self.num_stored += 1
                self._answer(task, stored)
            elif self._samples(number):
                asked.append(replace(task, round=self._round))
                self._resampled.add(number)
            else:
                self.num_missing += 1
                self._mail.send(task.owner, ScoredGroup(task.batch, task.position, "", [], 0))
        self.num_asked += len(asked)
        if asked:
            self._engines.open(asked)

    def time_batch(self) -> BatchTime | None:
        return self._engines.time_batch()

    def take_uses(self) -> dict[int, EngineUse]:
        return self._engines.take_uses()

    def _answer(self, task: Task, stored: Trajectory) -> None:
        numbers = (stored.num_preemptions, stored.num_kept_tokens, stored.num_read_tokens, stored.num_cached_tokens)
        group = ScoredGroup(task.batch, task.position, stored.engine, stored.scores, *numbers)
        self._mail.send(task.owner, group, payload=stored.batch.to_bytes())

    def _on_written(self, letter: Letter[GroupWritten]) -> None:
        with self._lock:
            self.num_written += 1
            self.num_tokens += letter.message.num_tokens
            if (now := time.monotonic()) - self._shown_at > PROGRESS_S:
                self._shown_at = now
                print(f"oneworld: {self.num_written} of {count_of(self.num_asked, 'group')} sampled", flush=True)


@dataclass(frozen=True)
class StoredGroups:
    """The groups of a step that exist already. Only the leader has their contents."""

    order: FindGroups
    groups: dict[GroupKey, Trajectory]


def gather_files(
    mail: Mailbox,
    placement: Placement,
    runs: Sequence[Path],
    order: FindGroups | None,
    choose: Callable[[Mapping[int, Sequence[FoundFile]]], Mapping[int, list[int]]],
) -> tuple[FindGroups, dict[GroupKey, StoredFile]]:
    """Gather the files of a step from the disks of all nodes. Return the leader's order, and on the leader the files.

    Every rank calls this, with the folders of runs on its node; only the leader has the `order`. `choose` gets the list
    of each node, by its first rank, and returns the places of the files to send. It is called on the leader, and may
    raise an error that ends the run.
    """
    leader, leads, found = placement.leader, placement.node_leads, list[FoundFile]()
    if order is not None:
        for rank in range(placement.world_size):
            mail.send(rank, order)
    order = mail.receive(FindGroups).message
    if order.is_done:
        return order, {}
    if mail.rank in leads:
        found = list(_find(runs, order))
        mail.send(leader, GroupsFound(found))
    lists: dict[int, list[FoundFile]] = {}
    num_chosen = 0
    if mail.rank == leader:
        lists = {letter.source: letter.message.files for letter in [mail.receive(GroupsFound) for _ in leads]}
        chosen = choose(dict(sorted(lists.items())))
        num_chosen = sum(map(len, chosen.values()))
        for lead in leads:
            mail.send(lead, SendGroups(chosen.get(lead, [])))
    if mail.rank in leads:
        for place in mail.receive(SendGroups).message.places:
            HEART.beat(f"sends {found[place].path}")
            mail.send(leader, GroupFile(place), payload=_read(Path(found[place].path)))
    gathered = {}
    for _ in range(num_chosen):
        letter = mail.receive(GroupFile)
        file = lists[letter.source][letter.message.place]
        gathered[file.key] = StoredFile(file.path, letter.payload)
    return order, gathered


def choose_files(lists: Mapping[int, Sequence[FoundFile]]) -> dict[int, list[int]]:
    """Choose one file of each group, if several folders or nodes have it. Return the places in each node's list."""
    chosen: dict[int, list[int]] = {}
    seen: set[GroupKey] = set()
    for rank, files in lists.items():
        for place, file in enumerate(files):
            if file.key not in seen and not file.damage and not file.differences:
                seen.add(file.key)
                chosen.setdefault(rank, []).append(place)
    return chosen


def _find(runs: Sequence[Path], order: FindGroups) -> Iterator[FoundFile]:
    """Yield the files of a step on this node."""
    for run in runs:
        for key, path in list_files(trajectory_folder(run, order.step)).items():
            HEART.beat(f"reads the header of {path}")
            try:
                differences, damage = compare_provenance(read_provenance(path), order.provenance), ""
            except (OSError, ValueError) as error:
                differences, damage = [], str(error)
            yield FoundFile(key.round, key.number, str(path), differences, damage)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it was removed since it was listed; the leader finds that it is damaged
        return b""
