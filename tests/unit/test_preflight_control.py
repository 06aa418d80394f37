"""Rank 0 and the others over real connections, and what a node finds out about itself."""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.checks import facts, gpus
from launch.checks.control import Hub, Member, Unanswered, every, reach
from launch.checks.links import Sink, send_to, unreachable
from launch.checks.net import listen
from launch.checks.node import Answers
from rl.config.load import load_config
from rl.config.schema import RewardConfig

pytestmark = pytest.mark.timeout(30)
Calls = dict[str, Callable[..., Any]]


@contextmanager
def world(*members: Calls) -> Iterator[tuple[Hub, list[socket.socket]]]:
    """A hub and these ranks, all of number 0 to themselves, so that none ends the process that they share."""
    with listen(0) as server:
        connections = []
        for rank, calls in enumerate(members):
            connection = reach("127.0.0.1", server.getsockname()[1], 5)
            connections.append(connection)
            member = Member(rank, connection, calls)
            member._rank = 0
            threading.Thread(target=member.serve, daemon=True).start()
        hub = Hub(server, len(members))
        hub.gather(5)
        yield hub, connections
        for connection in connections:
            connection.close()


def test_all_answer() -> None:
    double: Calls = {"double": lambda number: 2 * number}
    with world(double, double) as (hub, _):
        assert hub.ask("double", {0: {"number": 2}, 1: {"number": 3}}, 5) == {0: 4, 1: 6}
        assert hub.ask("double", every([1], number=4), 5) == {1: 8}
        assert hub.addresses() == {0: "127.0.0.1", 1: "127.0.0.1"}


def test_who_hangs_is_named_in_time() -> None:
    never = threading.Event()
    with world({"work": lambda: 1}, {"work": never.wait}) as (hub, _):
        began = time.monotonic()
        with pytest.raises(Unanswered, match=rf"rank 1 on {socket.gethostname()} did not answer in time \(work\)"):
            hub.ask("work", every([0, 1]), 0.3)
        hub.deadline = time.monotonic() + 0.2
        with pytest.raises(Unanswered, match="rank 1"):
            hub.ask("work", every([1]), 20)
        assert time.monotonic() - began < 3
        never.set()


def test_who_ends_is_named_at_once() -> None:
    never = threading.Event()
    with world({"work": lambda: 1}, {"work": never.wait}) as (hub, connections):
        threading.Timer(0.2, connections[1].shutdown, [socket.SHUT_RDWR]).start()
        began = time.monotonic()
        with pytest.raises(Unanswered, match=r"rank 1 on .* ended \(work\)"):
            hub.ask("work", every([0, 1]), 20)
        assert time.monotonic() - began < 3
        never.set()


def test_who_fails_is_named_with_the_reason() -> None:
    reason = r"rank 1 on .*: work: ZeroDivisionError: division by zero"
    with world({"work": lambda: 1}, {"work": lambda: 1 / 0}) as (hub, _), pytest.raises(Unanswered, match=reason):
        hub.ask("work", every([0, 1]), 5)


def test_who_never_comes_is_named() -> None:
    with listen(0) as server:
        hub = Hub(server, 3)
        Member(1, reach("127.0.0.1", server.getsockname()[1], 5), {})
        with pytest.raises(Unanswered, match=r"ranks 0,2 did not reach rank 0 on .* within 0.2 s"):
            hub.gather(0.2)
        address = server.getsockname()
    with pytest.raises(Unanswered, match=rf"cannot reach rank 0 at 127.0.0.1:{address[1]}: .*Connection refused"):
        reach("127.0.0.1", address[1], 0.1)


def test_strangers_are_not_taken_for_ranks() -> None:
    """Without a rank, with one that is none, with one that is here already; and what does not say hello at all."""
    hellos = [{"host": "a"}, {"rank": 9}, {"rank": "0"}, {"rank": None}, {"rank": [0]}, {"rank": 1}]
    lines = [{"kind": "hello", "host": "a", "speaks": True} | hello for hello in hellos]
    with listen(0) as server:
        place = ("127.0.0.1", server.getsockname()[1])
        Member(1, reach(*place, 5), {})
        with ExitStack() as stack:
            for line in [*lines, {"kind": "answer", "number": 1, "value": 1}, {"kind": "hello", "rank": 0}]:
                stranger = stack.enter_context(socket.create_connection(place))
                stranger.sendall(json.dumps(line).encode() + b"\n")
            hub = Hub(server, 2)
            with pytest.raises(Unanswered, match="rank 0 did not reach rank 0"):
                hub.gather(0.3)
            assert hub.addresses() == {1: "127.0.0.1"} and hub._hosts == {1: socket.gethostname()}


def test_rates_and_reach() -> None:
    sink = Sink()
    assert send_to("127.0.0.1", sink.port, 0.1)["rate"] > 10e6
    with listen(0) as server:
        port = server.getsockname()[1]
    assert send_to("127.0.0.1", port, 0.1) == {"error": "Connection refused"}
    places = {"here": ("127.0.0.1", sink.port), "gone": ("127.0.0.1", port)}
    assert unreachable(places) == {"gone": "Connection refused"}


def test_holder_of_a_port() -> None:
    with listen(0) as server:
        port = server.getsockname()[1]
        assert facts.holder(port).startswith(f"process {os.getpid()} (")
    assert facts.holder(port) == ""


def test_marks(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "runs")
    found = facts.leave_mark(folder, "one")
    assert found["error"] == "" and found["free"] > 0
    assert facts.seen_marks(folder, ["one", "two"]) == ["one"]
    facts.remove_mark(folder, "one")
    facts.remove_mark(folder, "one")
    assert facts.seen_marks(folder, ["one", "two"]) == []
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "runs"
    assert facts.leave_mark(str(path), "one") == {"error": f"Not a directory: {path}"}, "room is not what is missing"


def test_a_full_disk_tells_how_much_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    found = facts.leave_mark(str(tmp_path / "new" / "runs"), "one")
    assert found["free"] > 0 and found["error"] == f"No space left on device: {tmp_path / 'new' / 'runs'}"


def test_code_and_commit(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "rl" / "a.py").write_text("y = 1\n")
    before = facts.code_digest({}, tmp_path)
    for stray in ("notes.md", "configs/mine.yaml", "tools/mine.py"):
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("of no account\n")
    assert facts.code_digest({}, tmp_path) == before and facts.commit(tmp_path) == ""
    (tmp_path / "rl" / "a.py").write_text("y = 2\n")
    assert facts.code_digest({}, tmp_path) != before
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    name = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert facts.commit(tmp_path) == name[:12]
    (tmp_path / "train.py").write_text("x = 2\n")
    assert facts.commit(tmp_path) == f"{name[:12]}+changes"


def test_files_of_reward_functions_are_code(tmp_path: Path) -> None:
    """Wherever a node keeps them; what is built in belongs to the project."""
    file = tmp_path / "mine.py"
    functions = {f"{file}:one": 1.0, f"{file}:two": 0.5, "math": 1.0}
    config = dataclasses.replace(load_config(), reward=RewardConfig(function=functions))
    answers = Answers(0, 0, lambda: config)
    assert answers.describe()["config_error"].endswith(f"but no file at {file}; required is file.py:function")
    found = []
    for text in ("one = 1\n", "one = 2\n"):
        file.write_text(text)
        found.append(answers.describe()["code"])
    assert found[0] != found[1]
    copy = tmp_path / "copy.py"
    copy.write_text("one = 2\n")
    assert facts.code_digest({str(file): copy}) == found[1] != facts.code_digest({})


def test_versions_are_those_of_the_packages() -> None:
    import torch

    found = facts.versions()
    assert found["torch"] == torch.__version__ and found["transformers"] != "absent"


@pytest.mark.parametrize(
    ("line", "top", "limit", "used"),
    [
        ("0::/slurm/job_7/step_0", "", "memory.max", "memory.current"),
        ("4:cpu,memory:/slurm/job_7/step_0", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_is_that_of_the_tightest_limit(
    line: str, top: str, limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of 8 MB, 5 of them in use, and in it a step of 6 MB, 1 of them in use: 3 MB are left of at most 6."""
    groups = {"slurm": ("max", 6), "slurm/job_7": (8 << 20, 5 << 20), "slurm/job_7/step_0": (6 << 20, 1 << 20)}
    for group, values in groups.items():
        (tmp_path / top / group).mkdir(parents=True)
        for name, value in zip((limit, used), values):
            (tmp_path / top / group / name).write_text(f"{value}\n")
    own = tmp_path / "own"
    own.write_text(f"2:pids:/elsewhere\n{line}\n")
    monkeypatch.setattr(facts, "CGROUPS", tmp_path)
    monkeypatch.setattr(facts, "OWN_CGROUP", own)
    assert facts.memory() == {"total": 6 << 20, "available": 3 << 20}
    own.write_text("0::/../outside\n")
    assert facts.memory()["total"] > 1 << 30, "no limit that can be seen"


def test_users_of_gpus_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '1, python, 9000 MiB'\necho '{os.getpid()}, python, 500 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus.users() == ["1, python, 9000 MiB"]
    monkeypatch.setattr(os, "getpid", lambda: 2)  # of another rank, which the same agent has started
    assert len(gpus.users()) == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert gpus.users() == ["1, python, 9000 MiB"]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:19:13 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)",
    ],
)
def test_the_driver_is_closed_or_open(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(facts, "NVIDIA_DRIVER", file)
    assert facts.driver_version() == facts.versions()["driver"] == "570.124.06"
