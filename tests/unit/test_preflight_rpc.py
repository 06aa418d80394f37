"""Questions and answers over real connections, and the host that a node reports."""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from launch.checks import gpus, host, rpc
from launch.checks.answers import Answers
from launch.checks.bandwidth import find_unreachable, measure_rate, receive_all
from launch.checks.rpc import Coordinator, NoAnswer, Responder, connect
from launch.checks.sockets import listen
from rl.common import versions
from rl.common.framing import pack
from rl.config.load import load_config
from rl.config.schema import EnvironmentConfig, RewardConfig

pytestmark = pytest.mark.timeout(30)
Handlers = dict[str, Callable[..., Any]]


@pytest.fixture(autouse=True)
def keep_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a test share its process."""
    monkeypatch.setattr(rpc, "end_process", lambda code, text, all_alive: None)


@contextmanager
def world(*handlers: Handlers) -> Iterator[tuple[Coordinator, list[socket.socket]]]:
    """A coordinator, and a rank with each of these handlers."""
    with listen(0) as server:
        connections, threads = [], []
        coordinator = Coordinator(server, len(handlers))
        for rank, own in enumerate(handlers):
            connection = connect("127.0.0.1", server.getsockname()[1], 5)
            connections.append(connection)
            responder = Responder(rank, connection)
            threads.append(threading.Thread(target=responder.serve, args=[own], daemon=True))
            threads[-1].start()
        coordinator.wait_for_ranks(5)
        try:
            yield coordinator, connections
        finally:
            for connection, thread in zip(connections, threads):
                with connection, suppress(OSError):  # it may be shut already
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join(5)  # a rank that lost rank 0 after `keep_process` would end the process of all tests
                assert not thread.is_alive()


def test_all_ranks_answer() -> None:
    double: Handlers = {"double": lambda number: 2 * number}
    with world(double, double) as (coordinator, _):
        assert coordinator.ask("double", {0: {"number": 2}, 1: {"number": 3}}, 5) == {0: 4, 1: 6}
        assert coordinator.ask("double", {1: {"number": 4}}, 5) == {1: 8}
        assert coordinator.addresses() == {0: "127.0.0.1", 1: "127.0.0.1"}


def test_a_rank_that_hangs_is_named_in_time() -> None:
    never = threading.Event()
    with world({"work": lambda: 1}, {"work": never.wait}) as (coordinator, _):
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=rf"rank 1 on {socket.gethostname()} did not answer in time \(work\)"):
            coordinator.ask("work", {0: {}, 1: {}}, 1)
        coordinator.deadline = time.monotonic() + 0.2
        with pytest.raises(NoAnswer, match="rank 1"):
            coordinator.ask("work", {1: {}}, 20)
        assert time.monotonic() - began < 15
        never.set()


def test_a_rank_that_ends_is_named_at_once() -> None:
    never = threading.Event()
    with world({"work": lambda: 1}, {"work": never.wait}) as (coordinator, connections):
        threading.Timer(0.2, connections[1].shutdown, [socket.SHUT_RDWR]).start()
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=r"rank 1 on .* ended \(work\)"):
            coordinator.ask("work", {0: {}, 1: {}}, 20)
        assert time.monotonic() - began < 15
        never.set()


def test_a_rank_that_fails_is_named_with_the_reason() -> None:
    reason = r"rank 1 on .*: work: ZeroDivisionError: division by zero"
    with world({"work": lambda: 1}, {"work": lambda: 1 / 0}) as (coordinator, _), pytest.raises(NoAnswer, match=reason):
        coordinator.ask("work", {0: {}, 1: {}}, 5)


def test_a_rank_that_never_comes_is_named() -> None:
    with listen(0) as server:
        coordinator = Coordinator(server, 3)
        Responder(1, connect("127.0.0.1", server.getsockname()[1], 5))
        with pytest.raises(NoAnswer, match=r"ranks 0,2 did not reach rank 0 on .* within 0.2 s"):
            coordinator.wait_for_ranks(0.2)
        address = server.getsockname()
    with pytest.raises(NoAnswer, match=rf"cannot reach rank 0 at 127.0.0.1:{address[1]}: .*Connection refused"):
        connect("127.0.0.1", address[1], 0.1)


def test_only_a_valid_hello_makes_a_rank() -> None:
    """Others send no rank, an invalid one, or one that has come already; or no hello at all."""
    hellos = [{"host": "a"}, {"rank": 9}, {"rank": "0"}, {"rank": None}, {"rank": [0]}, {"rank": 1}]
    lines = [{"kind": "hello", "host": "a", "prints": True} | hello for hello in hellos]
    with listen(0) as server:
        place = ("127.0.0.1", server.getsockname()[1])
        coordinator = Coordinator(server, 2)
        with ExitStack() as stack:
            Responder(1, stack.enter_context(connect(*place, 5)))
            for line in [*lines, {"kind": "answer", "number": 1, "value": 1}, {"kind": "hello", "rank": 0}]:
                other = stack.enter_context(connect(*place, 5))
                other.sendall(pack(json.dumps(line).encode()))
            with pytest.raises(NoAnswer, match="rank 0 did not reach rank 0"):
                coordinator.wait_for_ranks(0.3)
            assert coordinator.addresses() == {1: "127.0.0.1"}
            with pytest.raises(NoAnswer, match=f"^rank 1 on {socket.gethostname()} did not answer"):
                coordinator.ask("work", {1: {}}, 0.1)


def test_rates_and_unreachable_places() -> None:
    with listen(0) as server:
        port = server.getsockname()[1]
    server = listen(0)
    sink = server.getsockname()[1]
    listener = receive_all(server)
    assert measure_rate("127.0.0.1", sink, 0.1) > 10e6
    assert measure_rate("127.0.0.1", port, 0.1) == 0.0
    places = {"here": ("127.0.0.1", sink), "gone": ("127.0.0.1", port)}
    assert find_unreachable(places) == {"gone": "Connection refused"}
    listener.close()


def test_a_port_is_held_or_its_holder_named() -> None:
    answers = Answers(0, 0, load_config, print)
    with listen(0) as server:
        port = server.getsockname()[1]
        assert answers.hold_port(port).startswith(f"process {os.getpid()} (")
    assert answers.hold_port(port) == ""
    assert find_unreachable({"here": ("127.0.0.1", port)}) == {}


def test_markers_are_written_seen_and_removed(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "runs")
    found = host.write_marker(folder, "one")
    assert found["error"] == "" and found["free"] > 0
    assert host.find_markers(folder, ["one", "two"]) == ["one"]
    host.remove_marker(folder, "one")
    host.remove_marker(folder, "one")
    assert host.find_markers(folder, ["one", "two"]) == []
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "runs"
    assert host.write_marker(str(path), "one") == {"error": f"Not a directory: {path}"}, "the disk is not full"


def test_a_full_disk_reports_the_room_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    found = host.write_marker(str(tmp_path / "new" / "runs"), "one")
    assert found["free"] > 0 and found["error"] == f"No space left on device: {tmp_path / 'new' / 'runs'}"


def test_the_digest_and_commit_follow_the_code(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "rl" / "a.py").write_text("y = 1\n")
    before = host.code_digest({}, tmp_path)
    for stray in ("notes.md", "configs/mine.yaml", "tools/mine.py"):
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("of no account\n")
    assert host.code_digest({}, tmp_path) == before and versions.read_commit(tmp_path) == ""
    (tmp_path / "rl" / "a.py").write_text("y = 2\n")
    assert host.code_digest({}, tmp_path) != before
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    name = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert versions.read_commit(tmp_path) == name[:12]
    (tmp_path / "train.py").write_text("x = 2\n")
    assert versions.read_commit(tmp_path) == f"{name[:12]}+changes"


def test_files_of_reward_functions_are_code(tmp_path: Path) -> None:
    """They count wherever a node keeps them. Built-in functions belong to the project."""
    file = tmp_path / "mine.py"
    functions = {f"{file}:one": 1.0, f"{file}:two": 0.5, "math": 1.0}
    config = dataclasses.replace(load_config(), reward=RewardConfig(function=functions))
    answers = Answers(0, 0, lambda: config, print)
    assert answers.describe()["config_error"].endswith(
        f"but no file at {file}; give the path of a file and a function: file.py:function"
    )
    found = []
    for text in ("one = 1\n", "one = 2\n"):
        file.write_text(text)
        found.append(answers.describe()["node"]["versions"]["code"])
    assert found[0] != found[1]
    copy = tmp_path / "copy.py"
    copy.write_text("one = 2\n")
    assert host.code_digest({str(file): copy}) == found[1] != host.code_digest({})


@pytest.mark.parametrize("settings", [{"tools": ["{}:f"]}, {"class_": "{}:Game"}, {"rollout": "{}:f"}], ids=str)
def test_files_of_environments_are_code(settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    named = {key: [f"{file}:f"] if isinstance(value, list) else value.format(file) for key, value in settings.items()}
    config = dataclasses.replace(load_config(), environment=EnvironmentConfig(**named))
    answers = Answers(0, 0, lambda: config, print)
    assert f"but no file at {file}" in answers.describe()["config_error"]
    file.write_text("one = 1\n")
    assert answers.describe()["node"]["versions"]["code"] == host.code_digest({str(file): file}) != host.code_digest({})


def test_versions_are_those_of_the_packages() -> None:
    import torch

    found = versions.read_versions()
    assert found["torch"] == torch.__version__ and found["transformers"] != "absent"


@pytest.mark.parametrize(
    ("line", "top", "limit", "used"),
    [
        ("0::/slurm/job_7/step_0", "", "memory.max", "memory.current"),
        ("4:cpu,memory:/slurm/job_7/step_0", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_is_limited_by_the_tightest_control_group(
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
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "OWN_CGROUP", own)
    assert host.read_memory() == {"total": 6 << 20, "available": 3 << 20}
    own.write_text("0::/../outside\n")
    assert host.read_memory()["total"] > 1 << 30, "no visible limit"


def test_users_of_gpus_do_not_include_this_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '1, python, 9000 MiB'\necho '{os.getpid()}, python, 500 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus.list_gpu_processes() == ["1, python, 9000 MiB"]
    monkeypatch.setattr(os, "getpid", lambda: 2)  # another rank of the same agent
    assert len(gpus.list_gpu_processes()) == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert gpus.list_gpu_processes() == ["1, python, 9000 MiB"]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:19:13 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)",
    ],
)
def test_the_version_of_a_closed_or_open_driver(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(versions, "NVIDIA_DRIVER", file)
    assert versions.driver_version() == versions.read_versions()["driver"] == "570.124.06"
