"""Groups in files: written by engines, gathered from the disks of several nodes, and given out instead of engines."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.data.prompts import Prompt
from rl.data.trajectories import Trajectory, compare_provenance, read_provenance, read_trajectory, write_trajectory
from rl.data.trajectory_files import GroupKey, describe_steps, list_files, run_folder, trajectory_folder
from rl.placement.roles import plan
from rl.rollout.archive import (
    ArchiveDispatcher,
    FindGroups,
    FoundFile,
    GroupRecorder,
    GroupWritten,
    choose_files,
    gather_files,
)
from rl.rollout.dispatch import Dispatcher, NewTasks, Pull, Sampling, Task
from rl.rollout.responses import Response, pack_group
from rl.rollout.service import ScoredGroup
from rl.world.messages import Mailbox
from tests.mails import connected, take

pytestmark = pytest.mark.timeout(30)
OK = {"parts": {"rule": 1.0}, "status": "ok", "answer": None}
FAILED = OK | {"status": "error"}
PROVENANCE = {"the version of the weights": 3, "rollout.temperature": 1.0}


@pytest.fixture
def mails() -> Iterator[list[Mailbox]]:
    with connected(3) as made:
        yield made


def make_group(number: int, is_ended: bool = True) -> Trajectory:
    first = Response([number, 7], [-0.5, -0.25], [3, 3], is_ended=True, reward=0.5)
    second = Response([number], [-1.0], [3], b"" if is_ended else b"abc", is_ended=is_ended)
    return Trajectory(pack_group([1, 2], 0, [first, second]), [OK, FAILED if is_ended else None], "fake", 4, 5)


def task_of(number: int, position: int, owner: int = 1) -> Task:
    return Task(9, position, owner, Prompt(0, 0, "p", "a", [1, 2], number=number), Sampling(2, 1.0, 4), version=3)


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_group_comes_back_as_it_was(is_ended: bool, tmp_path: Path) -> None:
    group, key = make_group(12, is_ended), GroupKey(1, 12)
    write_trajectory(tmp_path, key, group, 3, PROVENANCE)
    (path,) = list_files(tmp_path).values()
    assert path == tmp_path / "round_1.group_12.safetensors"
    assert read_provenance(path) == PROVENANCE
    found = read_trajectory(key, path.read_bytes())
    ours, theirs = found.batch.tensors(), group.batch.tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ("noise" in ours) == (not is_ended)
    assert (found.scores, found.engine, found.num_preemptions, found.num_kept_tokens) == (group.scores, "fake", 4, 5)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    key = GroupKey(1, 12)
    write_trajectory(tmp_path, key, make_group(12), 3, PROVENANCE)
    path = tmp_path / key.file
    data = path.read_bytes()
    with pytest.raises(ValueError, match="must hold one group, number 13, as its name says"):
        read_trajectory(GroupKey(1, 13), data)
    for cut in (0, 7, 100, len(data) - 1):
        with pytest.raises(ValueError):  # noqa: PT011  it depends on the place
            read_trajectory(key, data[:cut])
        path.write_bytes(data[:cut])
        if cut < 200:
            with pytest.raises(ValueError):  # noqa: PT011
                read_provenance(path)


def test_only_whole_files_count(tmp_path: Path) -> None:
    for name in ("round_1.group_3.safetensors.12ab.part", "round_0.group_3.safetensors", "round_1.group_.safetensors"):
        (tmp_path / name).write_bytes(b"")
    write_trajectory(tmp_path, GroupKey(2, 1), make_group(1), 3, PROVENANCE)
    write_trajectory(tmp_path, GroupKey(1, 10), make_group(10), 3, PROVENANCE)
    write_trajectory(tmp_path, GroupKey(1, 9), make_group(9), 3, PROVENANCE)
    assert list(list_files(tmp_path)) == [(1, 9), (1, 10), (2, 1)]


def test_differences_are_named() -> None:
    other = {"the version of the weights": 2, "rollout.temperature": 1.0, "rollout.top_k": 5}
    assert compare_provenance(other, PROVENANCE) == [
        "the version of the weights is 2 there and 3 here",
        "rollout.top_k is 5 there and null here",
    ]
    assert compare_provenance(dict(PROVENANCE), PROVENANCE) == []


def test_folders(tmp_path: Path) -> None:
    assert run_folder("runs/x") == run_folder("runs/x/trajectories") == run_folder("runs/x/trajectories/step_3")
    assert describe_steps(tmp_path) == f"{tmp_path} has none"
    for step in (1, 2, 12):
        trajectory_folder(tmp_path, step).mkdir(parents=True)
    assert describe_steps(tmp_path) == f"{tmp_path} has groups of step 1-2,12"


def test_a_group_counts_as_scored_unless_all_of_its_samples_failed() -> None:
    batch: Any = None
    assert Trajectory(batch, [FAILED, OK], "", 0, 0).has_score
    assert Trajectory(batch, [None, None], "", 0, 0).has_score
    assert not Trajectory(batch, [FAILED, None], "", 0, 0).has_score


def test_engines_write_groups_before_the_leader_hears_of_them(mails: list[Mailbox], tmp_path: Path) -> None:
    recorder = GroupRecorder(mails[1], 0, tmp_path, FindGroups(3, PROVENANCE))
    group = make_group(12)
    message = ScoredGroup(9, 0, "fake", group.scores, 4, 5)
    recorder.record(
        Task(9, 0, 0, Prompt(0, 0, "", "", [], number=12), Sampling(2, 1, 4), 3, round=2), message, group.batch
    )
    assert take(mails[0], GroupWritten).message.num_tokens == 3
    assert list(list_files(tmp_path / "trajectories" / "step_3")) == [(2, 12)]


def test_stored_groups_stand_in_for_engines(mails: list[Mailbox]) -> None:
    """Rank 0 leads, rank 1 owns the groups, and rank 2 is an engine."""
    groups = {GroupKey(1, 10): make_group(10), GroupKey(2, 11): make_group(11), GroupKey(2, 10): make_group(10)}
    archive = ArchiveDispatcher(mails[0], Dispatcher(mails[0], [2]), groups, samples=lambda number: number != 12)
    mails[2].send(0, Pull(8, 0))
    archive.open([task_of(10, 0), task_of(11, 1), task_of(12, 2)])
    (asked,) = take(mails[2], NewTasks).message.tasks
    assert (asked.prompt.number, asked.position, asked.round) == (11, 1, 1)
    stored, missing = (take(mails[1], ScoredGroup) for _ in range(2))
    assert (stored.message.batch, stored.message.position, stored.message.scores) == (9, 0, [OK, FAILED])
    assert (stored.message.num_preemptions, stored.message.num_kept_tokens) == (4, 5)
    assert stored.payload == make_group(10).batch.to_bytes()
    assert (missing.message.position, missing.payload) == (2, b"")
    mails[2].send(0, Pull(8, 0))
    archive.open([task_of(10, 0), task_of(11, 1)])  # the file of 11 continues another group than the one sampled now
    assert take(mails[1], ScoredGroup).message.position == 0
    (asked,) = take(mails[2], NewTasks).message.tasks
    assert (asked.prompt.number, asked.round) == (11, 2)
    mails[2].send(0, Pull(8, 0))
    archive.open([task_of(-1, 0)])  # an evaluation, which is no round
    (asked,) = take(mails[2], NewTasks).message.tasks
    assert asked.round == 0
    assert (archive.num_stored, archive.num_asked, archive.num_missing) == (2, 2, 1)


def test_files_are_gathered_from_the_disks_of_all_nodes(mails: list[Mailbox], tmp_path: Path) -> None:
    """Three nodes of one rank. Nodes 0 and 1 share a disk, and node 2 has its own. Some groups are twice there."""
    places = {0: (1, 2), 1: (1, 2), 2: (2, 3)}
    disks = {0: tmp_path / "shared", 1: tmp_path / "shared", 2: tmp_path / "private"}
    for rank, numbers in places.items():
        for number in numbers:
            write_trajectory(trajectory_folder(disks[rank], 5), GroupKey(1, number), make_group(number), 5, PROVENANCE)
    write_trajectory(trajectory_folder(disks[2], 5), GroupKey(1, 4), make_group(4), 5, {})
    (trajectory_folder(disks[2], 5) / "round_1.group_6.safetensors").write_bytes(b"damaged")
    shutil.copytree(disks[2], disks[2].with_name("twin"))
    placement, seen = plan({"actor": "1", "rollout": "rest"}, 3, 1), dict[int, list[FoundFile]]()
    runs = {0: [disks[0]], 1: [disks[1]], 2: [disks[2], disks[2].with_name("twin")]}

    def choose(lists: Any) -> Any:
        seen.update(lists)
        return choose_files(lists)

    def of_rank(rank: int) -> Any:
        order = FindGroups(5, PROVENANCE) if rank == placement.leader else None
        return gather_files(mails[rank], placement, runs[rank], order, choose)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(of_rank, range(3)))
    assert [len(files) for _, files in results] == [0, 3, 0]
    assert {key.number: Path(file.path).parent for key, file in results[1][1].items()} == {
        1: trajectory_folder(disks[0], 5),
        2: trajectory_folder(disks[0], 5),
        3: trajectory_folder(disks[2], 5),
    }
    assert all(read_trajectory(key, file.data).num_preemptions == 4 for key, file in results[1][1].items())
    by_number = {file.number: file for file in seen[2]}
    assert by_number[4].differences[0] == "the version of the weights is null there and 3 here"
    assert by_number[6].damage and not by_number[6].differences
