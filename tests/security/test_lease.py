"""The lease on a run folder: who gets it, when it expires, and what an owner does that has lost it.

Machines are names that the tests invent, so "another machine" needs no second machine.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import rl.run.lease
from rl.checkpoint.directory import CheckpointDirectory
from rl.checkpoint.manifest import CheckpointError
from rl.common.events import read_events, write_event
from rl.common.json_channel import JsonChannel
from rl.config.schema import ROOT, ConfigError
from rl.run.lease import take_lease
from rl.watch import lease as lease_module
from rl.watch import watchdog as watchdog_module
from rl.watch.lease import (
    RELEASED,
    RESTARTS,
    Lease,
    LeaseContender,
    LeaseFolder,
    LeaseLost,
    LeaseOwner,
    LeaseRefused,
    ProcessIdentity,
    this_machine,
)
from rl.world.sealed_store import SealedStore
from rl.world.world import World
from tests.launcher import until
from tests.mails import connected
from tests.unit.test_board import report
from tests.unit.test_checkpoint_store import MANIFEST
from tests.unit.test_watchdog import watched

pytestmark = pytest.mark.timeout(60)
EXPIRE_S, RESTART_S = 0.6, 1.2


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "EXPIRE_S", EXPIRE_S)
    monkeypatch.setattr(lease_module, "RESTART_S", RESTART_S)
    monkeypatch.setattr(lease_module, "POLL_S", 0.02)


def process(machine: str, pid: int = 77, started: int = 5) -> ProcessIdentity:
    return ProcessIdentity(f"host-of-{machine}", machine, pid, started)


def owner(world: str, *launchers: ProcessIdentity, **job: str) -> LeaseOwner:
    return LeaseOwner.of(world, list(launchers) or [process(world)], job)


def contend(run: Path, wanted: LeaseOwner, machine: str = "mine") -> Lease:
    contender = LeaseContender(run, wanted, machine, lambda text: None)
    contender.wait_until_free(lambda: None)
    return contender.take(lambda: None)[0]


def contend_timed(run: Path, wanted: LeaseOwner, machine: str = "mine") -> float:
    """Take the lease and return how long that took."""
    begun = time.monotonic()
    contend(run, wanted, machine)
    return time.monotonic() - begun


@contextmanager
def renewed(lease: Lease) -> Iterator[None]:
    """Renew a lease in a thread, as its owner's watchdog does."""
    is_over = threading.Event()

    def renew() -> None:
        with suppress(LeaseLost):
            while not is_over.wait(0.05):
                lease.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def files(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "lease").iterdir())


CONTEND = """
import sys
from pathlib import Path
from rl.common.waiting import wait_until_readable
from rl.watch import lease
from rl.watch.lease import LeaseContender, LeaseOwner, LeaseRefused, ProcessIdentity
lease.EXPIRE_S, lease.POLL_S = 2.0, 0.01
name = sys.argv[1]
owner = LeaseOwner(name, [ProcessIdentity("host", name, 1, 1)])
for line in sys.stdin:
    try:
        taken, _ = LeaseContender(Path(line.strip()), owner, name, lambda text: None).take(lambda: None)
    except LeaseRefused:
        print("refused", flush=True)
        continue
    print("won", flush=True)
    while not wait_until_readable([sys.stdin], 0.02):
        taken.renew()
"""


def test_exactly_one_of_several_processes_gets_the_lease(tmp_path: Path) -> None:
    """Ten times, at the same instant. In every second round they all find an expired lease."""
    command = [sys.executable, "-c", CONTEND]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    contenders = [subprocess.Popen([*command, f"machine{number}"], **pipes) for number in range(4)]
    try:
        for number in range(10):
            run = tmp_path / str(number)
            if number % 2:
                contend(run, owner("dead"))
                os.utime(run / "lease" / "1.json", (0, 0))
            for contender in contenders:
                contender.stdin.write(f"{run}\n")
                contender.stdin.flush()
            assert sorted(contender.stdout.readline() for contender in contenders) == ["refused\n"] * 3 + ["won\n"]
            assert files(run) == [f"{1 + number % 2}.json"]
    finally:
        for contender in contenders:
            contender.stdin.close()
            contender.wait(10)
            contender.stdout.close()


def test_a_renewed_lease_is_refused_and_the_refusal_says_whose_it_is(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1", process("other"), process("third"), SLURM_JOB_ID="9"))
    before = (tmp_path / "lease" / "1.json").read_bytes()[20:]
    with renewed(first), pytest.raises(LeaseRefused) as refusal:
        contend(tmp_path, owner("w2"))
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path} on {socket.gethostname()} is in use by another launch: ")
    assert "process 77 on host-of-other and 1 more node, Slurm job 9, world w1, last heartbeat 0 s ago" in text
    assert "stop that launch, or give this one another run.name" in text
    assert files(tmp_path) == ["1.json"]
    assert (tmp_path / "lease" / "1.json").read_bytes()[20:] == before, "only the counter was changed"


@pytest.mark.parametrize("clock_s", [-600.0, 0.0, 600.0])
def test_a_lease_expires_by_its_counter_whatever_the_clocks_say(
    clock_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's host stamps files with a clock that is ten minutes behind or ahead. So does the contender's."""
    first = contend(tmp_path, owner("w1"))
    stamp, now = LeaseFolder(tmp_path).file(1), time.time
    os.utime(stamp, (now() + clock_s, now() + clock_s))
    monkeypatch.setattr(time, "time", lambda: now() - clock_s)
    assert EXPIRE_S <= contend_timed(tmp_path, owner("w2")) < EXPIRE_S + 1.0
    with pytest.raises(LeaseLost, match="was taken over by another launch: process 77 on host-of-w2, world w2"):
        first.renew()


@pytest.mark.parametrize("clock_s", [-600.0, 600.0])
def test_a_lease_is_refused_by_its_counter_whatever_the_clocks_say(clock_s: float, tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1"))
    stamp = LeaseFolder(tmp_path).file(1)

    def wait_with_wrong_stamps() -> None:
        first.renew()
        os.utime(stamp, (time.time() + clock_s, time.time() + clock_s))

    with pytest.raises(LeaseRefused):
        LeaseContender(tmp_path, owner("w2"), "mine", lambda text: None).wait_until_free(wait_with_wrong_stamps)


def test_a_very_old_lease_needs_no_watching(tmp_path: Path) -> None:
    contend(tmp_path, owner("w1"))
    then = LeaseFolder(tmp_path).file(1).stat().st_mtime - 1801
    os.utime(LeaseFolder(tmp_path).file(1), (then, then))
    assert contend_timed(tmp_path, owner("w2")) < EXPIRE_S


def test_the_next_launch_takes_a_released_lease_at_once(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1"))
    first.end(is_final=True)
    assert LeaseFolder(tmp_path).newest()[1].beat == RELEASED
    assert contend_timed(tmp_path, owner("w2")) < EXPIRE_S
    assert files(tmp_path) == ["2.json"], "numbers go on, so that a suspended owner of the first notices"


def test_a_world_that_is_being_restarted_has_more_time(tmp_path: Path) -> None:
    contend(tmp_path, owner("w1")).end(is_final=False)
    assert LeaseFolder(tmp_path).newest()[1].beat == RESTARTS
    assert RESTART_S <= contend_timed(tmp_path, owner("w2")) < RESTART_S + 1.0


def test_a_launch_that_comes_back_from_a_restart_keeps_its_folder(tmp_path: Path) -> None:
    contend(tmp_path, owner("w1", process("other"))).end(is_final=False)
    contender = LeaseContender(tmp_path, owner("w2"), "mine", lambda text: None)
    restart = iter([None, None, lambda: contend(tmp_path, owner("w1 again", process("other")), "other")])
    with pytest.raises(LeaseRefused, match="world w1 again"):
        contender.wait_until_free(lambda: (work := next(restart)) and work())


def test_a_launch_that_ends_while_it_is_watched_gives_way(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1"))
    contender = LeaseContender(tmp_path, owner("w2"), "mine", lambda text: None)
    begun = time.monotonic()
    contender.wait_until_free(lambda: first.end(is_final=True))
    assert time.monotonic() - begun < EXPIRE_S


def test_a_restart_of_the_same_launch_takes_over_at_once(tmp_path: Path) -> None:
    """Node a is gone, and rank 0 has moved to node b."""
    contend(tmp_path, owner("w1", process("a"), process("b")))
    assert contend_timed(tmp_path, owner("w2", process("b"), process("c"))) < EXPIRE_S


def test_a_requeued_job_takes_over_at_once(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1", SLURM_JOB_ID="9", SLURM_CLUSTER_NAME="c"))
    with renewed(first):  # two launches in one allocation have the same job id
        for other in (
            {"SLURM_JOB_ID": "9", "SLURM_CLUSTER_NAME": "c"},
            {"SLURM_JOB_ID": "9", "SLURM_CLUSTER_NAME": "d", "SLURM_RESTART_COUNT": "1"},
            {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": "1"},
        ):
            with pytest.raises(LeaseRefused):
                contend(tmp_path, owner("w2", **other))
    requeued = owner("w2", SLURM_JOB_ID="9", SLURM_CLUSTER_NAME="c", SLURM_RESTART_COUNT="1")
    assert contend_timed(tmp_path, requeued) < EXPIRE_S


def test_a_launcher_on_this_machine_decides(tmp_path: Path) -> None:
    """While it lives it may restart its world, even if the counter stands still for hours. It may end as a zombie."""
    here, now = this_machine(), time.time()
    launcher = subprocess.Popen(["sleep", "60"])
    try:
        identity = ProcessIdentity.of(launcher.pid)
        contend(tmp_path, owner("w1", identity), here)
        os.utime(LeaseFolder(tmp_path).file(1), (now - 9999, now - 9999))
        with pytest.raises(LeaseRefused, match=r"last heartbeat (9998|9999|1000\d) s ago"):
            contend(tmp_path, owner("w2"), here)
    finally:
        launcher.kill()
    until(lambda: not identity.is_running(here), "the launcher has ended", 10)
    assert contend_timed(tmp_path, owner("w2"), here) < EXPIRE_S
    launcher.wait()


def test_a_process_with_the_id_of_the_launcher_is_not_the_launcher(tmp_path: Path) -> None:
    own = ProcessIdentity.of(os.getpid())
    contend(tmp_path, owner("w1", replace(own, started=own.started - 1)), own.machine)
    assert contend_timed(tmp_path, owner("w2"), own.machine) < EXPIRE_S


def test_launchers_on_other_machines_are_watched_even_if_the_one_here_is_gone(tmp_path: Path) -> None:
    """An elastic launch goes on without a node."""
    own = ProcessIdentity.of(os.getpid())
    gone = replace(own, started=own.started - 1)
    with renewed(contend(tmp_path, owner("w1", gone, process("other")))), pytest.raises(LeaseRefused):
        contend(tmp_path, owner("w2"), own.machine)


def test_a_machine_that_cannot_be_identified_knows_no_process(tmp_path: Path) -> None:
    own = replace(ProcessIdentity.of(os.getpid()), machine="")
    assert own.is_running("") is None
    with renewed(contend(tmp_path, owner("w1", own))), pytest.raises(LeaseRefused):
        contend(tmp_path, owner("w2"), "")


def test_a_process_of_another_user_that_proc_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessIdentity.of(os.getpid())

    def hide(pid: int) -> list[str]:
        raise FileNotFoundError

    def deny(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(lease_module, "read_stat", hide)
    monkeypatch.setattr(os, "kill", deny)
    assert own.is_running(own.machine) is None


def test_a_suspended_owner_notices_and_changes_nothing(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1"))
    second = contend(tmp_path, owner("w2"))
    before = (tmp_path / "lease" / "2.json").read_bytes()
    for use in (first.check, first.renew):
        with pytest.raises(LeaseLost):
            use()
    with pytest.raises(FileNotFoundError):
        first.end(is_final=True)
    assert files(tmp_path) == ["2.json"]
    assert (tmp_path / "lease" / "2.json").read_bytes() == before
    second.renew()


def test_a_slow_contender_does_not_take_a_number_that_was_used_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw the first lease released. Since then two others came, so the second number is free again."""
    contend(tmp_path, owner("w1")).end(is_final=True)
    slow = LeaseContender(tmp_path, owner("slow"), "mine", lambda text: None)
    slow.wait_until_free(lambda: None)
    seen = LeaseFolder(tmp_path).newest()
    contend(tmp_path, owner("w2")).end(is_final=True)
    third = contend(tmp_path, owner("w3"))
    newest, stale = LeaseFolder.newest, iter([seen])
    monkeypatch.setattr(LeaseFolder, "newest", lambda folder: next(stale, None) or newest(folder))
    with renewed(third), pytest.raises(LeaseRefused, match="world w3"):
        slow.take(lambda: None)
    assert files(tmp_path) == ["3.json"]


def test_an_owner_notices_a_takeover_although_nfs_lists_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a list of names until this host changes the folder. Files are opened on the server."""
    first = contend(tmp_path, owner("w1"))
    listdir, lists = os.listdir, {0: ["1.json"]}
    read_clock = LeaseFolder.read_clock

    def change_folder(folder: LeaseFolder) -> float | None:
        lists.clear()
        return read_clock(folder)

    contend(tmp_path, owner("w2"))
    monkeypatch.setattr(os, "listdir", lambda path: lists.get(0) or listdir(path))
    monkeypatch.setattr(LeaseFolder, "read_clock", change_folder)
    with pytest.raises(LeaseLost, match="world w2"):
        first.check()


def test_an_owner_whose_lease_was_deleted_goes_on(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1"))
    (tmp_path / "lease" / "1.json").unlink()
    first.check()


def test_an_owner_whose_folder_was_deleted_notices_the_next_launch(tmp_path: Path) -> None:
    """The next launch counts from one again, so it has the same number."""
    first = contend(tmp_path, owner("w1"))
    shutil.rmtree(tmp_path / "lease")
    second = contend(tmp_path, owner("w2"))
    assert second.number == first.number
    for use in (first.check, first.renew):
        with pytest.raises(LeaseLost, match="world w2"):
            use()
    first.end(is_final=True)
    assert LeaseFolder(tmp_path).newest()[1].beat == "0000000000", "the lease of the second was not released"
    second.renew()


def test_a_file_system_that_hangs_for_a_while_costs_nobody_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the contender can read the counter then, nor the owner change it. Afterwards the contender is faster."""
    monkeypatch.setattr(lease_module, "RENEW_S", EXPIRE_S / 5)
    first = contend(tmp_path, owner("w1"))
    contender = LeaseContender(tmp_path, owner("w2"), "mine", lambda text: None)
    newest, number = LeaseFolder.newest, iter(range(1000))

    def look(folder: LeaseFolder) -> Any:
        if (count := next(number)) == 2:
            time.sleep(1.5 * EXPIRE_S)
        found = newest(folder)
        if count == 3:  # one look after the end of the hang
            first.renew()
        return found

    monkeypatch.setattr(LeaseFolder, "newest", look)
    with pytest.raises(LeaseRefused, match="world w1"):
        contender.wait_until_free(lambda: None)


def test_a_request_that_a_network_file_system_repeats_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeat(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # raises FileExistsError

    monkeypatch.setattr(os, "link", repeat)
    taken, is_creator = LeaseContender(tmp_path, owner("w1"), "mine", print).take(lambda: None)
    assert (taken.number, is_creator, files(tmp_path)) == (1, True, ["1.json"])


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = contend(tmp_path, owner("w1"))
    with renewed(first), pytest.raises(LeaseRefused):
        contend(tmp_path, owner("w2"))
    assert files(tmp_path) == ["1.json"]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"beat": "0000000000", "launchers": []}', "[]", "\xff"])
def test_a_damaged_file_expires_too(text: str, tmp_path: Path) -> None:
    contend(tmp_path, owner("w1"))
    (tmp_path / "lease" / "1.json").write_text(text)
    assert EXPIRE_S <= contend_timed(tmp_path, owner("w2")) < EXPIRE_S + 2.0


def test_renewing_needs_no_space_on_the_disk(tmp_path: Path) -> None:
    first = contend(tmp_path, owner("w1"))
    before = LeaseFolder(tmp_path).file(1).stat()
    for _ in range(3):
        first.renew()
    after = LeaseFolder(tmp_path).file(1).stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert json.loads(LeaseFolder(tmp_path).file(1).read_text())["beat"] == "0000000003"


# Checkpoints


def test_an_owner_that_lost_its_lease_commits_and_deletes_nothing(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints", None, 0, contend(tmp_path, owner("w1")))
    directory.create_root("r1")
    for step in (1, 2):
        payload = replace(MANIFEST, step=step, save_id=f"w1-{step}").to_json()
        directory.prepare(step, f"w1-{step}", f"step_{step}.tmp-w1-{step}", {}, payload)
        if step == 1:
            directory.commit(1, "w1-1")
    contend(tmp_path, owner("w2"))
    before = sorted(directory.root.rglob("*"))
    for call in (
        lambda: directory.create_root("r1"),
        lambda: directory.rename_root("old"),
        lambda: directory.prepare(3, "w1-3", "step_3.tmp-w1-3", {}, payload),
        lambda: directory.commit(2, "w1-2"),
        lambda: directory.remove("w1-2", [1]),
    ):
        with pytest.raises(CheckpointError, match="was taken over by another launch"):
            call()
    assert sorted(directory.root.rglob("*")) == before


# The watchdog


def described(run: Path, taken: Lease) -> dict[str, Any]:
    return {"folder": str(run), "number": taken.number, "token": taken.token, "owner": asdict(taken.owner)}


def test_the_watchdog_renews_the_lease_and_releases_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "RENEW_S", 0.05)
    taken = contend(tmp_path, owner("w1"))
    with watched(tmp_path) as (_, rank, _):
        rank.send("lease", renews=True, **described(tmp_path, taken))
        until(lambda: LeaseFolder(tmp_path).newest()[1].beat >= "0000000002", "the counter changes")
        rank.send("done")
    assert LeaseFolder(tmp_path).newest()[1].beat == RELEASED


def test_the_watchdog_says_that_a_killed_rank_is_restarted(tmp_path: Path) -> None:
    taken = contend(tmp_path, owner("w1"))
    with watched(tmp_path) as (process, rank, _):
        rank.send("lease", renews=True, **described(tmp_path, taken))
        until(lambda: LeaseFolder(tmp_path).newest()[1].beat == "0000000001", "the lease is renewed")
        process.kill()
    assert LeaseFolder(tmp_path).newest()[1].beat == RESTARTS


@pytest.mark.parametrize(("cause", "mark"), [("fatal", RELEASED), ("stopped", "0000000001"), ("error", RESTARTS)])
def test_what_the_watchdog_says_at_the_end(cause: str, mark: str, tmp_path: Path) -> None:
    """After a SIGTERM nobody knows whether the launcher restarts the world, so the lease just expires."""
    taken = contend(tmp_path, owner("w1"))
    write_event(tmp_path, "start", 0, "attempt 1", world="token")
    with watched(tmp_path) as (_, rank, _):
        rank.send("lease", renews=True, **described(tmp_path, taken))
        until(lambda: LeaseFolder(tmp_path).newest()[1].beat == "0000000001", "the lease is renewed")
        rank.send("report", **report(0, cause))
        until(lambda: "abort" in [message["kind"] for message in rank.receive()], "the verdict")
    assert LeaseFolder(tmp_path).newest()[1].beat == mark
    _, end = read_events(tmp_path)
    assert (end.kind, end.step) == ("stop" if cause == "stopped" else "fault", 7), end


def test_the_watchdog_of_a_node_that_shares_the_disk_only_looks(tmp_path: Path) -> None:
    taken = contend(tmp_path, owner("w1"))
    with watched(tmp_path) as (_, rank, _):
        rank.send("lease", renews=False, **described(tmp_path, taken))
        rank.send("done")
    assert LeaseFolder(tmp_path).newest()[1].beat == "0000000000"


@pytest.mark.parametrize("renews", [True, False])
def test_one_watchdog_per_disk_writes_how_the_world_ended(renews: bool, tmp_path: Path) -> None:
    taken = contend(tmp_path, owner("w1"))
    write_event(tmp_path, "start", 0, "attempt 1", world="token")
    with watched(tmp_path) as (_, rank, _):
        rank.send("lease", renews=renews, **described(tmp_path, taken))
        rank.send("report", **report(0, "error"))
        until(lambda: "abort" in [message["kind"] for message in rank.receive()], "the verdict")
    assert [event.kind for event in read_events(tmp_path)] == (["start", "fault"] if renews else ["start"])


def test_the_watchdog_ends_a_rank_that_lost_its_lease_and_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "RENEW_S", 0.05)
    taken = contend(tmp_path, owner("w1"))
    messages: list[dict[str, Any]] = []
    with watched(tmp_path) as (_, rank, _):
        rank.send("lease", renews=True, **described(tmp_path, taken))
        until(lambda: (tmp_path / "status" / "board.json").exists(), "a status")
        LeaseContender(tmp_path, owner("w2", SLURM_JOB_ID="1"), "mine", print)._create(2)
        until(lambda: messages.extend(rank.receive()) or messages[-1]["kind"] == "abort", "the verdict")
        status = (tmp_path / "status" / "board.json").read_bytes()
    assert messages[-1]["stop"], "torchrun must not restart it"
    assert not (tmp_path / "FATAL").exists(), "it would tell the launcher of the new owner not to restart"
    assert not (tmp_path / "attempts.json").exists()
    assert (tmp_path / "status" / "board.json").read_bytes() == status
    assert LeaseFolder(tmp_path).newest()[1].beat == "0000000000"


# Nodes


@dataclass
class Launch:
    """A world of one rank per folder, each on a node of its own, in threads of this process."""

    folders: list[Path]
    launcher: int
    worlds: list[World]
    watchdogs: list[JsonChannel]

    def take(self) -> list[Any]:
        """Take the lease on all nodes, and return each rank's lease or error."""
        results: list[Any] = [None for _ in self.worlds]

        def take(world: World, folder: Path) -> None:
            OF_THREAD.launcher = self.launcher
            try:
                results[world.rank] = take_lease(world, folder)
            except Exception as error:
                results[world.rank] = error
                for other in self.worlds:
                    other.mail.fail(error)

        with ThreadPoolExecutor(len(self.worlds)) as pool:
            list(pool.map(take, self.worlds, self.folders))
        return results

    def renews(self) -> list[bool]:
        """Return which watchdogs were last told to renew the lease."""
        return [[each["renews"] for each in watchdog.receive()][-1] for watchdog in self.watchdogs]


OF_THREAD = threading.local()


@contextmanager
def launched(folders: list[Path], launcher: int) -> Iterator[Launch]:
    """Start a world whose launcher is the process `launcher`."""
    with connected(len(folders)) as mails, ExitStack() as stack:
        lines = [[stack.enter_context(end) for end in socket.socketpair()] for _ in mails]
        store = SealedStore(dist.HashStore(), f"{launcher:08d}")
        worlds = [World(mail, 0, len(folders), store, JsonChannel(ours)) for mail, (ours, _) in zip(mails, lines)]
        yield Launch(folders, launcher, worlds, [JsonChannel(theirs) for _, theirs in lines])


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the ids of two processes, which stand for the launchers of two launches."""
    monkeypatch.setattr(rl.run.lease, "launcher_process", lambda: SimpleNamespace(pid=OF_THREAD.launcher))
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_nodes_of_a_world_agree_on_private_and_on_shared_disks(
    is_shared: bool, launchers: list[int], tmp_path: Path
) -> None:
    folders = [tmp_path / ("x" if is_shared else name) for name in "bca"]
    with launched(folders, launchers[0]) as first:
        assert [lease.number for lease in first.take()] == [1, 1, 1]
        assert first.renews() == [True, not is_shared, not is_shared]
    with launched(folders[1:], launchers[1]) as second:
        refused = second.take()
    for error in refused:
        assert isinstance(error, ConfigError)
        assert f"in use by another launch: process {launchers[0]} on " in str(error)


def test_rank_0_renews_a_lease_that_another_node_created(launchers: list[int], tmp_path: Path) -> None:
    """Its watchdog is the last to end. The disk has another path on the other node, which takes its lease first."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").mkdir()
    with launched([tmp_path / "b", tmp_path / "a"], launchers[0]) as launch:
        assert [lease.number for lease in launch.take()] == [1, 1]
        assert launch.renews() == [True, False]


def test_a_refusal_on_one_node_leaves_the_other_nodes_untouched(launchers: list[int], tmp_path: Path) -> None:
    with launched([tmp_path / "b"], launchers[0]) as first:
        first.take()
    with launched([tmp_path / "a", tmp_path / "b", tmp_path / "c"], launchers[1]) as second:
        assert {type(result) for result in second.take()} == {ConfigError}
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_settings(launchers: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with launched([tmp_path / "a", tmp_path / "file" / "x"], launchers[0]) as launch:
        assert "run.dir: cannot make " in str(launch.take()[0])


def test_of_two_launches_on_the_same_private_disks_one_wins(launchers: list[int], tmp_path: Path) -> None:
    """They number the nodes the other way round. Ten times, at the same instant."""
    for number in range(10):
        folders = [tmp_path / f"{number}{name}" for name in "ab"]
        with (
            launched(folders, launchers[0]) as first,
            launched(folders[::-1], launchers[1]) as second,
            ThreadPoolExecutor(2) as pool,
        ):
            results = list(pool.map(Launch.take, [first, second]))
        kinds = sorted([type(result).__name__ for result in taken] for taken in results)
        assert kinds == [["ConfigError", "ConfigError"], ["Lease", "Lease"]], results
