"""Two launches of one run.name, in every order: only one works in the run folder, and nothing of the other is lost."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl.watch import lease as lease_module
from rl.watch.lease import RELEASED, Lease, LeaseContender, LeaseFolder, LeaseOwner, ProcessIdentity
from tests.cluster import Node, cluster, end
from tests.launcher import ROOT, activated_environment, finish, members, spawn, start, until
from tests.security.test_lease import renewed

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]
SETTINGS = [
    "rollout.engine=fake",
    "train.num_steps=4",
    "train.num_prompts_per_step=4",
    "rollout.max_new_tokens=4",
    "eval.interval=0",
    "checkpoint.save_interval=1",
    "world.silence_floor_s=900",  # a held rank is not hung
    "world.silence_cap_s=900",
    "run.name=x",
]
END_S = 120


class Gates:
    """The places at which a launch of held_train.py is held."""

    def __init__(self, folder: Path, *names: str):
        folder.mkdir()
        self.folder = folder
        for name in names:
            (folder / f"{name}.closed").touch()

    def wait(self, name: str) -> None:
        until((self.folder / f"{name}.reached").exists, f"gate {name}", 100)

    def open(self, name: str) -> None:
        (self.folder / name).touch()


def launch(folder: Path, gates: Gates | None, *overrides: str, **extra: str) -> subprocess.Popen[str]:
    program = ["train.py"] if gates is None else ["tests/security/held_train.py", str(gates.folder)]
    return start("--nproc-per-node=1", *program, *SETTINGS, f"run.dir={folder}", *overrides, restarts=True, **extra)


def launch_without_torchrun(folder: Path, gates: Gates) -> subprocess.Popen[str]:
    program = [sys.executable, "tests/security/held_train.py", str(gates.folder)]
    return spawn([*program, *SETTINGS, f"run.dir={folder}"], activated_environment())


def launch_by_script(folder: Path) -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "launch" / "local.sh"), "--nproc", "1", *SETTINGS, f"run.dir={folder}"]
    return spawn(command, activated_environment(ONEWORLD_PREFLIGHT="0"))


def contents(run: Path) -> dict[str, bytes]:
    """Return every file of a run, without those that its owner keeps writing."""
    files = [path for path in run.rglob("*") if path.is_file() and path.parent.name not in ("status", "lease")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def committed(run: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*/COMMITTED"))


def assert_refused(process: subprocess.Popen[str]) -> str:
    output = finish(process, END_S)
    assert process.returncode != 0, output
    assert output.count(" is in use by another launch: process ") == 1, output
    assert output.count("oneworld: fatal, will not be restarted") == 1, output
    assert "Traceback" not in output.split("oneworld: fatal")[0], output
    return output


def assert_finished(process: subprocess.Popen[str], run: Path) -> str:
    output = finish(process, END_S)
    assert process.returncode == 0, output
    assert committed(run) == [3, 4]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4]
    return output


def take_elsewhere(run: Path, **job: str) -> Lease:
    """Take the lease as a launch on another machine."""
    owner = LeaseOwner.of("elsewhere", [ProcessIdentity("other-host", "another machine", 1, 1)], job)
    return LeaseContender(run, owner, "another machine", print).take(lambda: None)[0]


def test_a_second_launch_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    run, gates = tmp_path / "x", Gates(tmp_path / "gates", "update")
    first = launch(tmp_path, gates)
    gates.wait("update")
    until(lambda: committed(run) == [1, 2], "the second step is committed")
    before = contents(run)
    assert f"process {first.pid} on " in assert_refused(launch(tmp_path, None))
    assert_refused(launch(tmp_path, None, "--eval-only"))
    refused = assert_refused(launch_by_script(tmp_path)).rstrip().splitlines()[-1]
    assert " is in use by another launch: process " in refused, "it stands last"
    assert contents(run) == before, "the refused launches changed nothing"
    gates.open("update")
    assert_finished(first, run)


def test_a_second_launch_follows_a_clean_end_at_once(tmp_path: Path) -> None:
    run = tmp_path / "x"
    assert_finished(launch(tmp_path, None), run)
    assert LeaseFolder(run).newest()[1].beat == RELEASED
    output = assert_finished(launch(tmp_path, None), run)
    assert "watching" not in output
    assert "resumes after step 4" in output


@pytest.mark.parametrize("launch_first", [launch, launch_without_torchrun])
def test_a_second_launch_follows_a_killed_one_at_once(
    launch_first: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    run, gates = tmp_path / "x", Gates(tmp_path / "gates", "update")
    first = launch_first(tmp_path, gates)
    gates.wait("update")
    until(lambda: committed(run) == [1, 2], "the second step is committed")
    for process in members(first.pid):
        process.kill()
    first.communicate()
    output = assert_finished(launch(tmp_path, None), run)
    assert "watching" not in output
    assert "resumes after step 2" in output


def test_a_second_launch_is_refused_while_the_first_is_between_two_attempts(tmp_path: Path) -> None:
    run, gates = tmp_path / "x", Gates(tmp_path / "gates", "update", "restart")
    first = launch(tmp_path, gates)
    gates.wait("update")
    until(lambda: committed(run) == [1, 2], "the second step is committed")
    rank = json.loads((run / "status" / "rank_0.json").read_text())["pid"]
    (killed,) = [process for process in members(first.pid) if process.pid == rank]
    killed.kill()
    gates.wait("restart")
    before = contents(run)
    assert_refused(launch(tmp_path, None))
    assert contents(run) == before
    gates.open("update")
    gates.open("restart")
    assert "resumes after step 2" in assert_finished(first, run)


def test_of_two_launches_at_the_same_instant_one_wins(tmp_path: Path) -> None:
    gates = [Gates(tmp_path / f"gates{number}", "update") for number in range(2)]
    processes = [launch(tmp_path, gate) for gate in gates]
    until(lambda: any(process.poll() is not None for process in processes), "one of them has ended", 100)
    (winner,) = [number for number, process in enumerate(processes) if process.poll() is None]
    gates[winner].wait("update")
    assert_refused(processes[1 - winner])
    gates[winner].open("update")
    assert_finished(processes[winner], tmp_path / "x")


def test_a_suspended_owner_commits_nothing_after_a_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "EXPIRE_S", 2.0)  # only in this process
    run, gates = tmp_path / "x", Gates(tmp_path / "gates", "update")
    first = launch(tmp_path, gates)
    gates.wait("update")
    until(lambda: committed(run) == [1, 2], "the second step is committed")
    for process in members(first.pid):
        process.suspend()
    lease = take_elsewhere(run)
    gates.open("update")  # the next step begins as soon as the owner wakes
    with renewed(lease):
        for process in members(first.pid):
            process.resume()
        output = finish(first, END_S)
    assert first.returncode != 0
    assert "was taken over by another launch: process 1 on other-host" in output, output
    assert output.count("oneworld: fatal, will not be restarted") == 1, output
    assert committed(run) == [1, 2]
    assert not (run / "FATAL").exists()
    lease.check()


def test_a_lease_of_another_machine_expires_while_the_launch_watches(tmp_path: Path) -> None:
    take_elsewhere(tmp_path / "x")
    output = assert_finished(launch(tmp_path, None), tmp_path / "x")
    assert "x was leased by process 1 on other-host, world elsewhere; watching for up to 20 s" in output


def test_a_launch_on_another_machine_is_refused_by_the_heartbeat_alone(tmp_path: Path) -> None:
    lease = take_elsewhere(tmp_path / "x", SLURM_JOB_ID="9")
    with renewed(lease):
        assert " on other-host, Slurm job 9, world elsewhere, last heartbeat " in assert_refused(launch(tmp_path, None))
        job = {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}
        assert "watching" not in assert_finished(launch(tmp_path, None, **job), tmp_path / "x")


class Nodes:
    """Two nodes with private disks, and launches over both."""

    def __init__(self, nodes: list[Node], folder: Path):
        self.nodes, self.folder = nodes, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, gates: Gates, port: int) -> list[subprocess.Popen[bytes]]:
        torchrun = f"torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint head:{port} --rdzv-id {port}"
        command = f"{torchrun} tests/security/held_train.py {gates.folder} {' '.join(SETTINGS)}"
        launched = [node.start(f"{command} run.dir={self.folder / node.name}") for node in self.nodes]
        self.processes += launched
        return launched

    def output(self) -> str:
        return "\n".join(node.output for node in self.nodes)

    def committed(self) -> list[list[int]]:
        return [committed(self.folder / node.name / "x") for node in self.nodes]

    def contents(self) -> list[dict[str, bytes]]:
        return [contents(self.folder / node.name / "x") for node in self.nodes]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with cluster(2) as found:
        nodes = Nodes(found, tmp_path)
        try:
            yield nodes
        finally:
            end(nodes.processes)


def codes(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=END_S) for process in processes]


def test_two_nodes_with_private_disks(nodes: Nodes, tmp_path: Path) -> None:
    """The second launch is refused while the first runs, and takes over when the first was killed on both nodes."""
    gates = Gates(tmp_path / "gates", "update")
    first = nodes.launch(gates, 29500)
    gates.wait("update")
    until(lambda: nodes.committed() == [[1, 2], [1, 2]], "the second step is committed")
    before = nodes.contents()
    second = nodes.launch(gates, 29510)
    assert 0 not in codes(second), nodes.output()
    assert nodes.output().count(" is in use by another launch: process ") == 2, "once per node:\n" + nodes.output()
    assert nodes.output().count("oneworld: fatal, will not be restarted") == 1, nodes.output()
    assert nodes.contents() == before
    assert [process.poll() for process in first] == [None, None]
    for node in nodes.nodes:
        node.kill()
    gates.open("update")
    third = nodes.launch(gates, 29520)
    assert codes(third) == [0, 0], nodes.output()
    assert "resumes after step 2" in nodes.output()
    assert nodes.committed() == [[3, 4], [3, 4]]
    assert "watching" not in nodes.output()


def test_two_launches_at_the_same_instant_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    gates = [Gates(tmp_path / f"gates{number}", "update") for number in range(2)]
    launches = [nodes.launch(gate, port) for gate, port in zip(gates, (29500, 29510))]
    until(lambda: any(process.poll() is not None for process in nodes.processes), "one has ended", 100)
    until(lambda: any((gate.folder / "update.reached").exists() for gate in gates), "the other one trains", 100)
    (winner,) = [number for number, gate in enumerate(gates) if (gate.folder / "update.reached").exists()]
    assert 0 not in codes(launches[1 - winner]), nodes.output()
    told = nodes.output()
    assert told.count(" is in use by another launch: process ") == 2, f"once per node:\n{told}"
    gates[winner].open("update")
    assert codes(launches[winner]) == [0, 0], nodes.output()
    assert nodes.committed() == [[3, 4], [3, 4]]
