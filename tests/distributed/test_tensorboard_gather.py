"""tools/open_tensorboard.py over a real sshd: which events it finds and copies, and what it says if there are none."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.launcher import ROOT
from tests.ports import free_port
from tests.sshd import SshServer, ssh_server
from tests.terminal import CTRL_C, leave, tool

pytestmark = pytest.mark.timeout(60)


class Run:
    """A run with a folder on each of four nodes. This machine is node 0, with the folder `here`."""

    def __init__(self, folder: Path, server: SshServer):
        self.folders = [folder / f"disk{node}" / "x" for node in range(4)]
        for path in self.folders:
            path.mkdir(parents=True)
        self.here, self.server = self.folders[0], server
        self.ssh = ["--ssh", server.command, "--identity", str(server.identity), "--ssh-user", "root"]

    @property
    def nodes(self) -> str:
        return ",".join(f"node{node}:{self.folders[node]}" for node in range(1, 4))

    def gather(self, *more: str | Path, code: int = 0) -> str:
        command = [sys.executable, "tools/open_tensorboard.py", *map(str, more), *self.ssh, "--gather-only"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ssh_server(tmp_path) as server:
        yield Run(tmp_path, server)


def write_rewards(folder: Path, steps: range) -> Path:
    """Write an event file as the leader does, in which the reward is the number of the step. Return its path."""
    before = {*folder.glob("events.*")}
    writer = EventFileWriter(str(folder))
    for step in steps:
        value = Summary.Value(tag="reward/mean", simple_value=step)
        writer.add_event(Event(step=step, wall_time=step, summary=Summary(value=[value])))
    writer.close()
    (path,) = {*folder.glob("events.*")} - before
    return path


def rewards_in(folder: Path) -> list[float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars("reward/mean")]


def status_of(hosts: list[str]) -> str:
    """Return a status file. All ranks but the last one roll out."""
    row: dict[str, Any] = {"stage": "rollout", "step": 3, "done": False}
    ranks = [row | {"rank": rank, "host": host, "roles": "rollout"} for rank, host in enumerate(hosts)]
    ranks[-1]["roles"] = "actor"
    return json.dumps({"at": 0.0, "world": "w", "ranks": ranks})


def test_the_events_of_two_leaders_are_one_curve(run: Run) -> None:
    """After a restart the leader was on another node. A growing file is continued where its copy ends."""
    first = write_rewards(run.folders[1], range(1, 4))
    (run.folders[2] / "eval").mkdir()
    write_rewards(run.folders[2] / "eval", range(7, 8))
    time.sleep(1.1)  # names of event files begin with a time in seconds, and are read in that order
    second = write_rewards(run.folders[3], range(4, 6))
    whole, before = second.read_bytes(), len(second.read_bytes()) // 2
    second.write_bytes(whole[:before])
    copies = run.here / "tensorboard"
    said = run.gather(run.here, "--nodes", run.nodes)
    assert f"copied 1 file of node1:{run.folders[1]} to {copies}" in said and f"the events are in {copies}" in said
    assert (copies / second.name).read_bytes() == whole[:before]
    second.write_bytes(whole)
    num_bytes = run.server.num_bytes
    run.gather(run.here, "--nodes", run.nodes)
    assert rewards_in(copies) == [1, 2, 3, 4, 5] and rewards_in(copies / "eval") == [7]
    assert (copies / first.name).read_bytes() == first.read_bytes()
    assert run.server.num_bytes - num_bytes < 64 << 10


def test_the_status_says_which_node_has_the_leader(run: Run) -> None:
    """The nodes mount the same path, and rank 24 leads. No node is named on the command line."""
    (run.here / "status").mkdir()
    own = socket.gethostname()
    (run.here / "status" / "rank_0.json").write_text(status_of([own] * 8 + ["node1"] * 8 + ["node2"] * 8 + ["node3"]))
    events = write_rewards(run.here, range(1, 4))
    said = run.gather(run.here)
    assert "the leader, which writes the events, is rank 24 on node3" in said
    assert f"the events are in {run.here}\n" in said and not (run.here / "tensorboard").exists(), "the same files"
    # A file of another host shows that the disk is shared. Then no node is asked.
    events.rename(events.with_name(events.name.replace(f".{own}.", ".node3.")))
    run.ssh[1] = "false"
    assert f"the events are in {run.here}\n" in run.gather(run.here)


def test_what_is_missing_is_said(run: Run) -> None:
    said = run.gather(run.here, code=1)
    assert f"tensorboard: found no events of {run.here}; the leader writes them from its first step on" in said
    said = run.gather(run.here, "--nodes", f"node1:{run.here}/none,node2:{run.here}", code=1)
    assert f"found no events of {run.here}" in said and f"node1:{run.here}/none: " in said
    assert "there is no directory" in run.gather(run.here / "none", code=1)
    run.ssh[1] = f"none {run.ssh[1]}"
    assert "none: No such file or directory" in run.gather(run.here, "--nodes", run.nodes, code=1)
    run.ssh[1] = run.server.command
    assert "with --nodes also name the run" in run.gather("--nodes", run.nodes, code=2)
    assert "--nodes: got 'node1'" in run.gather(run.here, "--nodes", "node1", code=1)
    write_rewards(run.folders[2], range(1, 2))
    run.ssh[1] += " -o ConnectTimeout=2"
    said = run.gather(run.here, "--nodes", f"node2:{run.folders[2]},nowhere:/x")
    assert "without nowhere:/x: " in said and "the events are in" in said


def test_a_node_cannot_write_elsewhere(run: Run) -> None:
    """A symbolic link among the copies does not lead out of their folder."""
    events = write_rewards(run.folders[1], range(1, 2))
    copies, outside = run.here / "tensorboard", run.here / "outside"
    copies.mkdir()
    (copies / events.name).symlink_to(outside)
    assert "leads outside of" in run.gather(run.here, "--nodes", run.nodes, code=1)
    assert not outside.exists()


RUN_NAME = "x/."  # the folder of the run, and the folder in it that has the events


def served_rewards(port: int) -> list[float]:
    """Return the rewards that TensorBoard serves; empty until it has read the files."""
    address = f"http://127.0.0.1:{port}/data/plugin/scalars"
    with urllib.request.urlopen(f"{address}/tags", timeout=20) as answer:
        tags = json.load(answer)
    if "reward/mean" not in tags.get(RUN_NAME, {}):
        return []
    with urllib.request.urlopen(f"{address}/scalars?run={RUN_NAME}&tag=reward/mean", timeout=20) as answer:
        return [value for _, _, value in json.load(answer)]


@pytest.mark.slow
def test_tensorboard_serves_on_the_loopback_and_follows_the_run(run: Run) -> None:
    events = write_rewards(run.folders[3], range(1, 4))
    whole = events.read_bytes()
    part = whole[: len(whole) // 2]
    events.write_bytes(part)
    port = free_port()
    options = [run.here, "--nodes", run.nodes, *run.ssh, "--port", str(port), "--interval", "0.5"]
    person = tool("open_tensorboard.py", *options, timeout_s=40)
    person.expect(rf"http://127.0.0.1:{port}/#custom_scalars\S* on this machine; from your own machine, first run: ")
    person.expect(r"ssh -N -L (\S+) (\S+)\r")
    assert (person.match[1], person.match[2]) == (f"{port}:127.0.0.1:{port}", socket.gethostname())
    person.expect(rf"TensorBoard \S+ at http://127.0.0.1:{port}/")
    events.write_bytes(whole)
    deadline = time.monotonic() + 40
    while (rewards := served_rewards(port)) != [1, 2, 3]:
        assert time.monotonic() < deadline, rewards
        time.sleep(0.3)  # it reads its files every 5 s
    listening = subprocess.run(["ss", "-Htln", f"sport = :{port}"], capture_output=True, text=True).stdout
    assert re.findall(r"\S+:\d+(?=\s)", listening) == [f"127.0.0.1:{port}"], listening
    taken = subprocess.run(
        [sys.executable, "tools/open_tensorboard.py", str(run.here), *map(str, options[1:])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (
        taken.returncode == 1 and f"port {port}: Address already in use; give another one with --port" in taken.stderr
    )
    person.send(CTRL_C)
    assert leave(person) in (0, 130)
