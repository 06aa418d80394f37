"""launch/ssh.sh and tools/jobs.py over real sshds, with real training: two nodes of one rank each."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster import Node
from tests.launcher import activated_environment, command_of, until
from tests.ssh_cluster import SshCluster, copy_repository, ssh_cluster
from tests.sshd import ssh_server
from tests.terminal import CTRL_C, leave, terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = ["rollout.engine=fake", "train.num_prompts_per_step=4", "eval.interval=0", "train.num_steps=100000"]


def saved_step(run: Path) -> int:
    names = [path.name.removeprefix("step_") for path in run.glob("checkpoints/step_*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def jobs(nodes: SshCluster, *arguments: str | Path) -> str:
    words = [sys.executable, "tools/jobs.py", "--runs", nodes.runs, *arguments]
    done = subprocess.run(
        nodes.at_desk(*words), env=activated_environment(TMPDIR="/tmp"), capture_output=True, text=True, timeout=100
    )
    return done.stdout + done.stderr


def ranks_of(node: Node) -> list[int]:
    return [pid for pid in node.pids() if "train.py" in command_of(psutil.Process(pid))]


def test_two_clusters_side_by_side_with_disks_of_their_own(tmp_path: Path) -> None:
    """One is a job in the background. The other is followed in a terminal, where Ctrl-C ends it.

    The nodes have no .venv. Their environment is in a file on each node's own disk, which node1 lacks at first."""
    with ssh_cluster(tmp_path, 2) as nodes:
        venv, file = nodes.repository / ".venv", nodes.runs / "env.sh"
        (nodes.disks[0] / "env.sh").write_text((venv / "bin" / "activate").read_text())
        shutil.rmtree(venv)
        prepared = ["--nproc", "1", "--activate", str(file), "--forward", "TMPDIR"]
        said = jobs(nodes, "submit", "--hosts", nodes.hosts, "one", *prepared, *SETTINGS)
        assert f"oneworld: node 1 (node1): there is no file {file} that can be read" in said
        assert "one was not started" in said and nodes.processes()[1] == []
        (nodes.disks[1] / "env.sh").write_text((nodes.disks[0] / "env.sh").read_text())
        said = jobs(nodes, "submit", "--hosts", nodes.hosts, "one", *prepared, *SETTINGS)
        follow = f"python tools/jobs.py --runs {nodes.runs} logs -f one"
        assert said == f"{nodes.runs}/one: submitted; follow it with: {follow}\n"
        start = ["launch/ssh.sh", "start", "two", "--hosts", nodes.hosts, "--nproc", "1", "--activate", file]
        start += ["--follow", *SETTINGS]
        person = terminal(
            nodes.at_desk(*start, f"run.dir={nodes.runs}", "run.name=two"), timeout_s=100, **activated_environment()
        )
        person.expect("oneworld: two runs on 2 nodes; Ctrl-C saves and stops")
        person.expect(r"\[\d node\d\] /\S+/two: 2 ranks on 2 nodes")
        person.expect(r"\[\d node\d\] step 3/100000")
        busy = nodes.processes()
        person.send(CTRL_C)
        person.expect(r"\[\d node\d\] oneworld: stopped at step (\d+)")
        assert leave(person) == 143, "as the nodes ended"
        assert all(f"[{k} node{k}] ended with status 143" in person.before for k in (0, 1))
        for disk in nodes.disks:
            assert saved_step(disk / "two") >= 3, "each node has saved its shard on its own disk"
        assert not (nodes.runs / "two").exists(), "nothing of it is on the desk's disk"

        # The other one has gone on meanwhile. Its processes have the variable that was asked for.
        assert {psutil.Process(pid).environ().get("TMPDIR") for pid in ranks_of(nodes.nodes[1])} == {"/tmp"}
        name, state, step, *_ = jobs(nodes, "list").splitlines()[1].split()
        assert (name, state) == ("one", "running") and int(step) > 3
        shown = jobs(nodes, "status", "one")
        assert shown.startswith("one: running\n") and ", 2 ranks\n" in shown
        assert [line.split()[:2] for line in shown.splitlines()[-2:]] in (
            [["0", "node0"], ["1", "node1"]],
            [["0", "node1"], ["1", "node0"]],
        )
        log = jobs(nodes, "logs", "--rank", "0", "one")
        assert log.count("] step 1/100000") == 1 and len({line.split("]")[0] for line in log.splitlines()}) == 1, log
        assert "no node of one has a log of rank 2 yet" in jobs(nodes, "logs", "--rank", "2", "one")
        launcher = nodes.at_desk("launch/ssh.sh", "save", "one")
        said = subprocess.run(launcher, env=activated_environment(), capture_output=True, text=True, timeout=60).stdout
        assert sorted(said.splitlines()) == ["[0 node0] saves", "[1 node1] saves"]
        until(lambda: all(saved_step(disk / "one") for disk in nodes.disks), "a checkpoint on every node")
        follower = terminal(
            nodes.at_desk(sys.executable, "tools/jobs.py", "--runs", nodes.runs, "logs", "-f", "one"),
            **activated_environment(),
        )
        follower.expect(r"\[\d node\d\] step 1/")
        follower.send(CTRL_C)
        follower.expect("the nodes continue; launch/ssh.sh stop one stops them")
        assert leave(follower) == 130
        until(lambda: not nodes.desk.pids(), "the end of what followed them", 10)
        assert all(len(alone) < len(both) for alone, both in zip(nodes.processes(), busy, strict=True))
        assert jobs(nodes, "stop", "one") == "one: stopped\n"
        until(lambda: nodes.processes() == [[], []], "the end of every process on the nodes", 10)
        assert "one   stopped" in jobs(nodes, "list")
        for disk in nodes.disks:
            assert saved_step(disk / "one") >= 3

        # The events are on the node that had the leader. The desk knows the nodes from the job.
        gather = nodes.at_desk(sys.executable, "tools/open_tensorboard.py", nodes.runs / "one", "--gather-only")
        done = subprocess.run(gather, env=activated_environment(), capture_output=True, text=True, timeout=60)
        (written,) = [path for disk in nodes.disks for path in (disk / "one").glob("events.*")]
        copied = nodes.runs / "one" / "tensorboard" / written.name
        assert f"copied 1 file of {written.parent.parent.name}:{nodes.runs}/one to {copied.parent}" in done.stdout, done
        assert copied.read_bytes() == written.read_bytes()


def test_the_node_of_rank_0_finds_the_events_of_a_leader_elsewhere(tmp_path: Path) -> None:
    """Rank 0 has an engine, and rank 1 on the other node is the leader. Each node has its own disk."""
    with ssh_cluster(tmp_path, 2) as nodes:
        settings = [*SETTINGS[:-1], "train.num_steps=3", "placement.rollout=0", "placement.actor=1"]
        jobs(nodes, "submit", "--hosts", nodes.hosts, "x", "--nproc", "1", *settings)
        jobs(nodes, "logs", "-f", "x")
        (written,) = [path for disk in nodes.disks for path in (disk / "x").glob("events.*")]
        leader = written.parent.parent.name
        other = next(disk for disk in nodes.disks if disk.name != leader)
        ssh = f"ssh -F {tmp_path}/ssh_config -i {tmp_path}/identity"
        tool = f"{sys.executable} tools/open_tensorboard.py {nodes.runs}/x --gather-only --ssh {shlex.quote(ssh)}"
        command = nodes.at_desk("launch/ssh.sh", "run", "x", "--node", other.name.removeprefix("node"), tool)
        done = subprocess.run(command, env=activated_environment(), capture_output=True, text=True, timeout=60)
        assert f"the leader, which writes the events, is rank 1 on {leader}\n" in done.stdout, done
        assert (other / "x" / "tensorboard" / written.name).read_bytes() == written.read_bytes()


def test_nodes_on_the_loopback_train_on_vllm(tmp_path: Path) -> None:
    """Both nodes are 127.0.0.1 and share the run's directory. The embedded default trains a few steps."""
    repository = copy_repository(tmp_path / "repository")
    (tmp_path / "ssh").mkdir()
    (tmp_path / "hosts").write_text("node0\nnode1\n")
    with ssh_server(tmp_path / "ssh") as server:
        ssh = {"ONEWORLD_SSH": f"{server.command} -i {server.identity}", "ONEWORLD_PREFLIGHT": "0"}
        tool = [sys.executable, str(repository / "tools" / "jobs.py"), "--runs", str(tmp_path / "runs")]
        launcher = ["--hosts", str(tmp_path / "hosts"), "x", "--nproc", "1", "--head", "127.0.0.1"]
        settings = ["train.num_steps=3", "eval.interval=0"]

        def jobs_here(*arguments: str) -> str:
            done = subprocess.run(
                [*tool, *arguments], env=activated_environment(**ssh), capture_output=True, text=True, timeout=250
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        jobs_here("submit", *launcher, *settings)
        output = jobs_here("logs", "-f", "x")
        assert "2 ranks on 2 nodes" in output and "engine vllm" in output, output[-4000:]
        assert [output.count(f"[{k} node{k}] ended with status 0") for k in (0, 1)] == [1, 1]
        assert jobs_here("list").splitlines()[1].split()[:3] == ["x", "done", "3"]
        rows = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows][-3:] == [1, 2, 3]
