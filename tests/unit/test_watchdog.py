"""Tests of rl/watch/watchdog.py and of what it uses to see and end its rank: monitor, process, stacks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl.common.json_channel import JsonChannel
from rl.common.waiting import wait_until_readable
from rl.config.schema import ROOT
from rl.watch.heart import Heart
from rl.watch.monitor import RankMonitor
from rl.watch.process import Launcher, RankProcess
from rl.watch.reports import AttemptHistory
from rl.watch.silence import SilenceDetector
from rl.watch.stacks import Stacks, stands_in_collective
from rl.watch.watchdog import Watchdog
from tests.launcher import until
from tests.mails import KEY, listening
from tests.unit.test_board import report


@contextmanager
def running(line: socket.socket) -> Iterator[tuple[subprocess.Popen[bytes], Heart]]:
    """Run a process in place of a rank, and its watchdog in a thread with this end of their connection."""
    process, heart = subprocess.Popen(["sleep", "60"]), Heart()
    watchdog = threading.Thread(target=Watchdog(process.pid, 0, line, heart, Stacks()).run, daemon=True)
    watchdog.start()
    try:
        yield process, heart
    finally:
        process.kill()
        process.wait()
        watchdog.join(10)


@contextmanager
def watched(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], JsonChannel, Heart]]:
    """Run rank 0 and its watchdog, with the rank's end of their connection."""
    ours, theirs = socket.socketpair()
    rank = JsonChannel(ours)
    with running(theirs) as (process, heart):
        rank.send("host", address="127.0.0.1", key="00", size=1)
        rank.send("join", rank=0, local_rank=0, world="token", key="00", board=[])
        rank.send("run", folder=str(folder), floor_s=60.0, cap_s=60.0, collectives="")
        yield process, rank, heart


def test_a_pause_of_the_machine_is_not_blamed_on_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ahead_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead_s[0])
    ours, theirs = socket.socketpair()
    with running(theirs) as (process, _):
        JsonChannel(ours).send("run", folder=str(tmp_path), floor_s=1.0, cap_s=10.0, collectives="")
        time.sleep(0.5)
        ahead_s[0] += 20.0  # as if nothing ran for 20 s, neither the rank nor its watchdog
        time.sleep(0.5)
        assert process.poll() is None
        while process.poll() is None:  # now the watchdog runs all the time
            assert ahead_s[0] < 40.0
            ahead_s[0] += 0.5
            time.sleep(0.2)
        assert ahead_s[0] > 24.0, "the pause does not count, the 10 s after it do"


def test_the_last_heartbeat_of_a_rank_that_is_done_has_its_last_step() -> None:
    ours, theirs = socket.socketpair()
    rank = JsonChannel(ours)
    with listening() as (address, accepted), running(theirs) as (process, heart):
        rank.send("join", rank=1, local_rank=1, world="world", key=KEY.hex(), board=address)
        board = JsonChannel(accepted.get())
        messages: list[dict[str, Any]] = []
        until(lambda: messages.extend(board.receive()) or len(messages) >= 2, "the first beat")
        heart.describe(step=7)
        rank.send("done")
        process.kill()
        until(lambda: messages.extend(board.receive()) or messages[-1]["kind"] == "done", "the end")
    *_, beat, done = messages
    assert (beat["kind"], beat["state"]["step"], done["kind"]) == ("beat", 7, "done")


def test_a_frozen_rank_is_shown_as_such(tmp_path: Path) -> None:
    files = [tmp_path / "status" / f"{name}.json" for name in ("board", "rank_0")]

    def are_frozen() -> bool:
        if not all(file.exists() for file in files):
            return False
        board, rank = (json.loads(file.read_text()) for file in files)
        return board["ranks"][0]["frozen"] == rank["frozen"] == "its process was stopped by a signal"

    with watched(tmp_path) as (process, _, _):
        process.send_signal(signal.SIGSTOP)
        until(are_frozen, "both files say so")


def test_the_step_that_rank_0_reached_is_recorded_whoever_failed(tmp_path: Path) -> None:
    """Rank 0 may only serve, and so be a step ahead of the actor that was killed in step 7, in the next attempt too."""
    with watched(tmp_path) as (_, rank, heart):
        heart.describe(step=8)
        rank.send("report", **report(2, "lost"))
        until(lambda: "abort" in [message["kind"] for message in rank.receive()], "the verdict")
    assert json.loads((tmp_path / "attempts.json").read_text()) == [0, 8]


@pytest.mark.parametrize("name", ["is_repeated", "write_fatal", "note_end"])
def test_a_verdict_does_not_wait_for_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(AttemptHistory, name, lambda *args: is_over.wait())
    with watched(tmp_path) as (_, rank, _):
        rank.send("report", **report(0, "fatal" if name == "write_fatal" else "error"))
        messages: list[dict[str, Any]] = []
        until(lambda: messages.extend(rank.receive()) or len(messages) > 1, "the verdict", timeout_s=10)
    is_over.set()
    assert [message["kind"] for message in messages] == ["hosted", "abort"]


def test_a_state_names_exceptional_work_and_its_limit() -> None:
    heart = Heart()
    monitor = RankMonitor(heart, RankProcess(os.getpid(), leads_group=False), Stacks())
    for _ in range(2):
        heart.enter("update")
        monitor.update()
        heart.enter("between")
        monitor.update()
    heart.enter("update")
    with heart.exceptional("compiling"):
        monitor.update()
        compiles = monitor.state()
    monitor.update()
    works = monitor.state()
    assert (compiles.exceptional, compiles.limit_s) == ("compiling", SilenceDetector().cap_s)
    assert (works.exceptional, works.limit_s) == ("", SilenceDetector().floor_s)


@pytest.mark.parametrize(
    ("code", "has_crashed"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", True),
        ("import os; os._exit(1)", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", False),
        ("", False),
    ],
)
def test_a_crash_is_told_from_other_ends(code: str, has_crashed: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.5); {code}"])
    process = RankProcess(child.pid, leads_group=False)
    assert not process.has_crashed
    assert wait_until_readable([process.exit_fd], 10)
    assert process.has_crashed == has_crashed
    child.wait()
    assert not process.has_crashed, "the process is reaped, so nothing is known"


def test_early_ends_are_counted_once_per_start_until_the_ranks_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(attempt: int) -> list[int]:
        launchers = []
        for local_rank in (1, 0):  # the first rank of a node need not be the one that ends
            folder = tmp_path / "logs" / f"attempt_{attempt}" / str(local_rank)
            folder.mkdir(parents=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            launchers.append(Launcher(os.getpid()))
        return [launcher.count_early_death() for launcher in launchers]

    assert [counts(attempt) for attempt in range(3)] == [[1, 0], [2, 0], [3, 0]]
    Launcher(os.getpid()).forget_early_deaths()
    assert counts(3) == [1, 0]


def test_stacks_show_whether_a_rank_is_in_a_collective() -> None:
    lines = ["Thread 0x1 (most recent call first):", '  File "rl/world/messages.py", line 1 in _serve', ""]
    lines += ["Current thread 0x2 (most recent call first):", '  File "torch/distributed/x.py", line 1 in all_gather']
    assert stands_in_collective("\n".join(lines))
    assert not stands_in_collective("\n".join([*lines[:4], '  File "rl/learner/policy.py", line 9 in update']))
    assert not stands_in_collective("")


ASKS_AGAIN = """
import signal, time
from rl.watch.stacks import MAX_BYTES, SIGNAL, Stacks

def write_many(depth):
    if depth:
        return write_many(depth - 1)
    for _ in range(MAX_BYTES // 1000):
        signal.raise_signal(SIGNAL)

def somewhere():
    stacks = Stacks()
    write_many(50)
    assert len(stacks.take()) == MAX_BYTES
    stacks.ask(is_stopped=False)
    time.sleep(0.1)
    assert "in somewhere" in stacks.take()

somewhere()
"""


def test_stacks_are_read_however_many_were_written_before() -> None:
    """Use a process of its own, which has one thread."""
    subprocess.run([sys.executable, "-c", ASKS_AGAIN], cwd=ROOT, check=True, timeout=30)
