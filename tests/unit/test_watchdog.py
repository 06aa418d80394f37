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

import rl.watch.watchdog
from rl.common.json_channel import JsonChannel
from rl.common.waiting import wait_until_readable
from rl.config.schema import ROOT
from rl.watch import gpu
from rl.watch.death import RECENT_S, OutOfMemoryKills, describe_end
from rl.watch.heart import Heart
from rl.watch.launcher import Launcher
from rl.watch.monitor import RankMonitor
from rl.watch.process import RankProcess
from rl.watch.reports import AttemptHistory
from rl.watch.silence import SilenceDetector
from rl.watch.stacks import Stacks, stands_in_collective
from rl.watch.told import Level, Told, read_told, tell
from rl.watch.watchdog import Watchdog
from tests.launcher import until
from tests.mails import KEY, listening
from tests.nvml import StandIn
from tests.unit.test_board import report
from tools.install import PATH_FILE


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
        paused_at = time.monotonic()
        time.sleep(0.5)
        assert process.poll() is None
        while process.poll() is None:  # now the watchdog runs all the time
            assert ahead_s[0] < 60.0
            ahead_s[0] += 0.3
            time.sleep(0.1)
        assert time.monotonic() - paused_at > 9.0, "the pause does not count, the 10 s after it do"


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


def test_the_gpu_of_a_rank_is_measured_also_while_the_rank_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status files have the values, and the rank gets those of all ranks if it asks."""
    nvml = StandIn(tmp_path / "nvml")
    monkeypatch.setattr(gpu, "LIBRARY", str(nvml.path))
    nvml.show("GPU-a", 4096, 70)
    files = [tmp_path / "status" / f"{name}.json" for name in ("board", "rank_0")]

    def shows(memory_mb: int) -> bool:
        if not all(file.exists() for file in files):
            return False
        board, rank = (json.loads(file.read_text()) for file in files)
        return board["ranks"][0].get("gpu_memory_mb") == rank.get("gpu_memory_mb") == memory_mb

    with watched(tmp_path) as (process, rank, _):
        messages: list[dict[str, Any]] = []
        rank.send("gpu", uuid="GPU-a")
        until(lambda: shows(4096), "the card's memory")
        process.send_signal(signal.SIGSTOP)
        nvml.show("GPU-a", 8192, 0)
        until(lambda: shows(8192), "the card's memory while the rank is stopped")
        messages += rank.receive()
        assert [message["kind"] for message in messages if message["kind"] == "usage"] == []
        rank.send("collect_usage")
        until(lambda: messages.extend(rank.receive()) or messages[-1]["kind"] == "usage", "a row for the leader")
        ((number, host_mb, *card),) = messages[-1]["rows"]
        assert (number, card) == (0, [8192, 0])
        assert host_mb > 0, "the resident memory of the rank's process"


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
    ("code", "exit_code"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(3)", 3),
        ("", 0),
    ],
)
def test_the_end_of_a_process_is_known(code: str, exit_code: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE)
    process = RankProcess(child.pid, leads_group=False)
    assert process.exit_code is None and child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    assert wait_until_readable([process.exit_fd], 10)
    assert process.exit_code == exit_code
    child.wait()
    is_new = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
    assert process.exit_code == (exit_code if is_new else None), "after the agent has collected it"


@pytest.mark.parametrize(
    ("exit_code", "is_out_of_memory", "text"),
    [
        (-9, False, "its process was killed by signal 9 (SIGKILL), perhaps because the machine ran out of memory"),
        (-9, True, "its process was killed by signal 9 (SIGKILL) because the machine or its memory limit was "),
        (-7, True, "its process was killed by signal 7 (SIGBUS): memory could not be provided, for example because "),
        (-11, False, "its process was killed by signal 11 (SIGSEGV): native code accessed memory that is not its own"),
        (-6, False, "its process was killed by signal 6 (SIGABRT): native code gave up, with a message in the rank's"),
        (-1, False, "its process was killed by signal 1 (SIGHUP): its terminal was closed; tools/jobs.py runs a job "),
        (-40, False, "its process was killed by signal 40 (Real-time signal 6)"),
        (3, True, "its process exited with code 3 and reported no error"),
        (None, True, "its process ended without a report"),
    ],
)
def test_the_end_of_a_process_in_words(exit_code: int | None, is_out_of_memory: bool, text: str) -> None:
    assert describe_end(exit_code, is_out_of_memory, is_launcher_gone=False).startswith(text)
    assert describe_end(exit_code, is_out_of_memory, is_launcher_gone=True).startswith(
        "its process ended with torchrun"
    )


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events"),
        ("0::/../other", "sys/fs/cgroup/memory.events"),  # in a container, which sees its own group as the root
        ("1:cpu:/\n4:hugetlb,memory:/job\n0::/", "sys/fs/cgroup/memory/job/memory.oom_control"),
        ("0::/", "proc/vmstat"),
    ],
)
def test_kills_for_lack_of_memory_are_noticed(
    groups: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (("proc/self/cgroup", groups), (file, "oom 7\noom_kill 2\n")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    kills = OutOfMemoryKills(tmp_path)
    assert not kills.is_recent, "kills before the start do not count"
    (tmp_path / file).write_text("oom 8\noom_kill 3\n")
    assert kills.is_recent
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + RECENT_S)
    assert not kills.is_recent


EXHAUSTS_ITS_LIMIT = """
import os, subprocess, sys
from pathlib import Path
from rl.common.waiting import wait_until_readable
from rl.watch.death import OutOfMemoryKills, describe_end
from rl.watch.process import RankProcess

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
kills = OutOfMemoryKills()
child = subprocess.Popen([sys.executable, "-c", "x = []\\nwhile True: x.append(bytearray(1 << 20))"])
process = RankProcess(child.pid, leads_group=False)
wait_until_readable([process.exit_fd], 30)
print(describe_end(process.exit_code, kills.is_recent, is_launcher_gone=False))
"""


def test_a_process_that_exhausts_the_limit_of_its_cgroup_is_told_as_such() -> None:
    """Needs root, and a cgroup (version 1 or 2) that may limit the memory of another one."""
    counters = OutOfMemoryKills()._file
    group = counters.parent / f"oneworld-test-{os.getpid()}"
    name = "memory.max" if counters.name == "memory.events" else "memory.limit_in_bytes"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not (group / name).exists():
            pytest.skip(f"{group} has no {name}")
        assert "oom_kill " in counters.read_text()
        (group / name).write_text(str(200 << 20))
        command = [sys.executable, "-c", EXHAUSTS_ITS_LIMIT, str(group)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        told = "its process was killed by signal 9 (SIGKILL) because the machine or its memory limit was exhausted"
        assert done.stdout.startswith(told), done
    finally:
        group.rmdir()


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


@pytest.mark.parametrize("local_rank", [0, 1])
def test_one_line_per_node_says_why_the_ranks_end(
    local_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The board of another node sends the line."""
    file = tmp_path / "last_line"
    monkeypatch.setenv("ONEWORLD_LAST_LINE_FILE", str(file))
    ours, theirs = socket.socketpair()
    rank = JsonChannel(ours)
    with listening() as (address, accepted), running(theirs):
        rank.send("join", rank=2, local_rank=local_rank, world="world", key=KEY.hex(), board=address)
        board = JsonChannel(accepted.get())
        board.send("abort", stop=False, fatal="", is_told=True, line="oneworld: stopped at step 7")
        until(lambda: "abort" in [message["kind"] for message in rank.receive()], "the verdict")
    line = f"oneworld: the ranks on {socket.gethostname()} end: stopped at step 7\n"
    assert capfd.readouterr().err == (line if local_rank == 0 else "")
    assert (file.read_text() if file.exists() else None) == (line if local_rank == 0 else None)


def test_the_last_line_is_repeated_when_torchrun_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that torchrun restarts is no end, nor need a line be repeated if torchrun prints nothing after it."""

    def repeated(is_end: bool, count: str = "0") -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        torchrun = subprocess.Popen(["sleep", "0.3"])
        launcher = Launcher(torchrun.pid)
        launcher.keep_last("our line", is_final=is_end)
        line = launcher.wait_to_repeat(is_end)
        assert launcher.is_gone == bool(line)
        torchrun.wait()
        return line

    assert repeated(is_end=True) == "our line"
    assert repeated(is_end=False) == ""
    assert repeated(is_end=False, count="3") == "our line", "no restart is left"
    monkeypatch.setenv("ONEWORLD_TOLD_FILE", "/dev/null")
    assert repeated(is_end=True) == ""


@pytest.fixture
def told_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = str(tmp_path / "told")
    monkeypatch.setenv("ONEWORLD_TOLD_FILE", file)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return file


def test_what_a_rank_has_told_is_replaced_only_by_more_or_by_a_later_attempt(
    told_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launcher(attempt: int) -> Launcher:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        return Launcher(os.getpid())

    first, fast, slow = launcher(0), launcher(1), launcher(1)
    first.begin()
    assert read_told(told_file) == (0, Level.NOTHING)
    fast.keep_last("a rank ended", is_final=False)
    slow.begin()
    assert read_told(told_file) == (1, Level.MAY_RESTART), "the first rank of a node may start later than another"
    first.keep_last("the verdict of an earlier attempt", is_final=True)
    assert read_told(told_file) == (1, Level.MAY_RESTART)
    fast.keep_last("the end", is_final=True)
    slow.keep_last("a rank ended", is_final=False)
    assert read_told(told_file) == (1, Level.FINAL)
    last = launcher(3)
    last.begin()
    assert read_told(told_file) == (3, Level.NOTHING)
    last.keep_last("a rank ended", is_final=False)
    assert read_told(told_file) == (3, Level.FINAL), "no restart is left"


def test_a_watchdog_removes_the_file_of_a_killed_torchrun(told_file: str) -> None:
    torchrun = subprocess.Popen(["sleep", "60"])
    launcher = Launcher(torchrun.pid)
    launcher.begin()
    launcher.end()
    assert os.path.exists(told_file), "torchrun runs and may need it"
    torchrun.kill()
    torchrun.wait()
    launcher.keep_last("a rank was lost", is_final=False)
    launcher.end()
    assert not os.path.exists(told_file)


@pytest.mark.parametrize("how", ["torchrun restarts its ranks", "torchrun ends", "torchrun waits for our line"])
def test_a_node_is_called_stopped_only_if_its_torchrun_ends(
    how: str, told_file: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """torchrun also sends SIGTERM to ranks that it restarts, because a rank on another node has ended."""
    monkeypatch.setattr(rl.watch.watchdog, "VERDICT_S", 0.5)
    monkeypatch.setenv("LOCAL_RANK", "0")
    torchrun = subprocess.Popen(["sleep", "60"])
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    _, theirs = socket.socketpair()
    watchdog = threading.Thread(target=Watchdog(rank.pid, torchrun.pid, theirs, Heart(), Stacks()).run)
    watchdog.start()
    until(lambda: os.path.exists(told_file), "the watchdog")
    rank.terminate()
    if how == "torchrun ends":
        torchrun.kill()
    elif how == "torchrun waits for our line":
        tell(told_file, Told(0, Level.ASKED))
    watchdog.join(10)
    torchrun.kill()
    torchrun.wait()
    rank.wait()
    said = capfd.readouterr().err
    assert said == ("" if "restarts" in how else "oneworld: stopped by SIGTERM before the ranks had met\n")


@pytest.mark.parametrize(
    ("exit_code", "message", "says"),
    [(0, "raised", False), (0, "done", False), (1, "raised", True), (2, "unfit", False), (None, "raised", True)],
)
def test_only_a_failed_start_is_told(
    exit_code: int | None, message: str, says: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Python sends `raised` at every exit. The exit code is None if torchrun was faster than the watchdog."""
    monkeypatch.setattr(RankProcess, "exit_code", exit_code)
    monkeypatch.setattr(Launcher, "count_early_death", lambda self: 1)
    ours, theirs = socket.socketpair()
    with running(theirs):
        JsonChannel(ours).send(message, **({"line": ""} if message == "unfit" else {}))
    told = f"oneworld: a rank on {socket.gethostname()} ended before the ranks had met: its error is above\n"
    assert capfd.readouterr().err == (told if says else "")


def test_only_torchrun_is_made_quiet(tmp_path: Path) -> None:
    """Other programs in our .venv do not import the module, and torchrun keeps its messages until ranks say more."""
    (tmp_path / "oneworld.pth").write_text(PATH_FILE)
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(tmp_path)!r})\n")
    (tmp_path / "torchrun").write_text(TORCHRUN)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "ONEWORLD_QUIET_TORCHRUN": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    assert run("-c", "import sys; print('launch.quiet_torchrun' in sys.modules)", "torch").stdout == "False\n"
    torchrun = str(tmp_path / "torchrun")
    for words in (["none", "Child"], ["NOTHING", "Child"], ["FINAL", "OSError"], ["FINAL", "Child", "long ago"]):
        done = run(torchrun, *words)
        assert done.returncode == 1 and done.stdout == "", done
        assert ("a warning" in done.stderr) == ("none" in words), "a watchdog says it better"
        assert "Error: no\n" in done.stderr, done
    why, advice = "RendezvousTimeoutError: no", "set ONEWORLD_QUIET_TORCHRUN=0 to see its traceback"
    for words, shown in (
        (["FINAL", "Child"], ""),
        (["FINAL", "Rendezvous"], ""),
        (["MAY_RESTART", "Child"], "an error\n"),
        (["MAY_RESTART", "Rendezvous"], f"an error\noneworld: torchrun gave up: {why}; {advice}\n"),
    ):
        told = run(torchrun, *words)
        assert (told.returncode, told.stdout, told.stderr) == (1, "", shown), words


def test_the_last_collection_of_torchrun_skips_all_objects(tmp_path: Path) -> None:
    """It would visit all objects of torch once more, after the last line of the run."""
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); import launch.quiet_torchrun"
    for value, is_frozen in (("1", True), ("0", False)):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ONEWORLD_QUIET_TORCHRUN": value}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        assert (int(done.stdout) > 1000) == is_frozen, done


TORCHRUN = """
import logging, os, sys
import launch.quiet_torchrun as quiet
quiet.WAIT_S = 0.2
class ChildFailedError(Exception):
    __module__ = "torch.distributed.elastic.multiprocessing.errors"
class RendezvousTimeoutError(Exception):
    __module__ = "torch.distributed.elastic.rendezvous.api"
file, level, error = os.environ["ONEWORLD_TOLD_FILE"], sys.argv[1], sys.argv[2]
if level != "none":
    quiet.tell(file, quiet.Told(0, quiet.Level[level]))
if sys.argv[3:] == ["long ago"]:
    os.utime(file, (0, 0))
logging.getLogger("torch.distributed.elastic.agent").warning("a warning")
logging.getLogger("torch.distributed.elastic.agent").error("an error")
logging.getLogger("torch.distributed.elastic.multiprocessing.api").error("failed (exitcode: 1)")
raise {"OSError": OSError, "Child": ChildFailedError, "Rendezvous": RendezvousTimeoutError}[error]("no")
"""
