"""launch/preflight.py: a healthy machine and a healthy cluster pass. A fault on one node is named, and ends the launch
on all nodes before anything is started. Nodes are network namespaces."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster import SUBNET, Node, cluster, end
from tests.launcher import finish, start

pytestmark = [pytest.mark.alone, pytest.mark.timeout(150)]
SETTINGS = ["rollout.engine=fake", "train.num_steps=1", "run.name=x"]
CHECKS = ["nodes", "versions", "GPUs", "inside nodes", "run folder", "host memory", "placement"]
BETWEEN = ["clocks", "reach", "between nodes"]


def states(output: str) -> dict[str, str]:
    """Return the state of each check."""
    rows = re.findall(r"^(\w[\w ]*?) +(ok|warning|FAILED)  ", output, re.MULTILINE)
    return dict(rows)


def test_a_healthy_machine_passes(tmp_path: Path) -> None:
    process = start("--nproc-per-node=2", "launch/preflight.py", *SETTINGS, f"run.dir={tmp_path}")
    output = finish(process, 60)
    assert process.returncode == 0, output
    assert states(output) == dict.fromkeys(CHECKS, "ok"), output
    assert re.search(r"^preflight: ready, 1 node, 2 ranks, [\d.]+ s$", output, re.MULTILINE), output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # launch/run_node.sh asks before it starts torchrun
def test_mistakes_in_the_settings_are_reported_as_by_train_py() -> None:
    process = start("--nproc-per-node=2", "launch/preflight.py", "actor.lrr=1")
    output = finish(process, 60)
    assert process.returncode == 1
    assert output.count("oneworld: unknown config key actor.lrr; did you mean actor.lr?") == 1, output


def run(nodes: list[Node], command: str, timeout_s: float = 100) -> tuple[list[int], float]:
    """Run a command on every node, with the number of the node for %N. Return exit codes and seconds."""
    began, agents = time.monotonic(), []
    try:
        agents = [node.start(command.replace("%N", str(number))) for number, node in enumerate(nodes)]
        codes = [agent.wait(timeout=timeout_s) for agent in agents]
    finally:
        end(agents)
    return codes, time.monotonic() - began


@pytest.mark.slow
def test_a_healthy_cluster_passes_in_30_s(tmp_path: Path) -> None:
    """Run it as a person would, with a private disk on each node."""
    torchrun = "torchrun --nnodes 4 --nproc-per-node 2 --rdzv-endpoint head:29500 launch/preflight.py"
    with cluster(4) as nodes:
        codes, took = run(nodes, " ".join([torchrun, *SETTINGS, f"run.dir={tmp_path}/%N"]))
        output = "".join(node.output for node in nodes)
    assert (codes, states(output)) == ([0] * 4, dict.fromkeys([*CHECKS, *BETWEEN], "ok")), output
    assert "private to each node" in output and "preflight: ready, 4 nodes, 8 ranks" in output
    assert took < 30, output


def launch(
    nodes: list[Node],
    folder: Path,
    *,
    before: str = "true",
    planted: int = -1,
    all_alive: bool = True,
    **variables: str,
) -> str:
    """Run launch/run_node.sh on these nodes of a launch of three, after `before` on the one with a fault.

    All must end with 1 before torchrun starts train.py. Return the output of the head.
    """
    node = f"bash launch/run_node.sh --nnodes 3 --nproc 1 --head head --node-rank %N {' '.join(SETTINGS)}"
    given = " ".join(f"{name}={value!r}" for name, value in variables.items())
    mine = f"if [ %N = {planted} ]; then {before}; fi"
    script = f'{mine} && export {given} ONEWORLD_NODES="node0 node1 node2" && exec {node} run.dir={folder}/%N'
    codes, took = run(nodes, f"bash -c '{script}'")
    output = "".join(node.output for node in nodes)
    assert codes == [1] * len(nodes), output
    assert output.count("preflight failed, so nothing was started") == len(nodes), output
    assert not list(folder.glob("*/x")), "train.py was started"
    assert took < 60, output
    assert not all_alive or "Traceback" not in output, output
    return nodes[0].output


@pytest.mark.slow
def test_a_missing_node_is_named(tmp_path: Path) -> None:
    with cluster(3) as nodes:
        output = launch(nodes[:2], tmp_path, ONEWORLD_PREFLIGHT_WAIT_S="5")
        gave_up = "gave up after 5 s (ONEWORLD_PREFLIGHT_WAIT_S) on 1 of 3 nodes: node 2 (node2)"
        assert "oneworld: waiting for 1 of 3 nodes: node 2 (node2)" in output
        assert gave_up in output and gave_up in nodes[1].output


@pytest.mark.slow
def test_an_unreachable_head_is_reported(tmp_path: Path) -> None:
    with cluster(3) as nodes:
        nodes[2].cut_off()
        output = launch(nodes, tmp_path, ONEWORLD_PREFLIGHT_WAIT_S="6")
        assert "waiting for 1 of 3 nodes: node 2 (node2)" in output
        assert "node 2 (node2) cannot reach the head at head:29501" in nodes[2].output
        assert "node 2 (node2) could not reach the head at head:29501 within 6 s" in nodes[2].output


@pytest.mark.slow
def test_a_node_with_another_secret_is_named(tmp_path: Path) -> None:
    with cluster(3) as nodes:
        before = "export ONEWORLD_SECRET=a-secret-of-one-node"
        output = launch(nodes, tmp_path, before=before, planted=2, ONEWORLD_PREFLIGHT_WAIT_S="8")
        assert f"oneworld: refused 1 connection from {SUBNET}.3: no proof that it knows the run's secret" in output
        assert "on 1 of 3 nodes: node 2 (node2)" in output
        assert "set the same ONEWORLD_SECRET on every node; it retries for" in nodes[2].output
        assert "a-secret-of-one-node" not in "".join(node.output for node in nodes)


@pytest.mark.slow
def test_another_version_is_named(tmp_path: Path) -> None:
    package = tmp_path / "planted" / "transformers-1.2.3.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.2.3\n")
    with cluster(3) as nodes:
        before = f'export PYTHONPATH="{package.parent}:$PYTHONPATH"'
        output = launch(nodes, tmp_path / "runs", before=before, planted=1)
    assert re.search(r"^versions +FAILED  transformers: 1.2.3 on node 1 \(node1\), [\d.]+ on the others", output, re.M)
    assert "preflight: 1 problem: versions: transformers: 1.2.3 on node 1 (node1)" in output
    assert [name for name, state in states(output).items() if state == "FAILED"] == ["versions"], output


@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    with cluster(3) as nodes:
        output = launch(nodes, tmp_path, before=f"mount -t tmpfs -o size=16m none {tmp_path}/2", planted=2)
    assert f"{tmp_path}/2 on node 2 (node2) has 16.78 MB left, and a checkpoint and logs take" in output
    assert [name for name, state in states(output).items() if state == "FAILED"] == ["run folder"], output


@pytest.mark.slow
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    """Limit the link from node 1 to node 2, and no other, to 80 Mbit/s."""
    if not shutil.which("tc"):
        pytest.skip("no tc, which belongs to iproute2")
    rules = [
        "qdisc add dev eth0 root handle 1: htb default 1",
        "class add dev eth0 parent 1: classid 1:1 htb rate 40gbit",
    ]
    rules += ["class add dev eth0 parent 1: classid 1:2 htb rate 80mbit"]
    rules += [f"filter add dev eth0 protocol ip parent 1: u32 match ip dst {SUBNET}.3 flowid 1:2"]
    with cluster(3) as nodes:
        for rule in rules:
            done = subprocess.run(["tc", "-n", nodes[1].namespace, *rule.split()], capture_output=True, text=True)
            if "unknown" in done.stderr:
                pytest.skip(f"this kernel cannot slow down an interface: {done.stderr.strip()}")
            assert done.returncode == 0, done.stderr
        output = launch(nodes, tmp_path)
    found = re.search(
        r"^between nodes +FAILED  node 1 \(node1\) to node 2 \(node2\): ([\d.]+) MB/s, where", output, re.M
    )
    assert found and 5 < float(found[1]) < 15, output
    assert [name for name, state in states(output).items() if state == "FAILED"] == ["between nodes"], output


@pytest.mark.slow
def test_a_busy_port_is_named_with_its_process(tmp_path: Path) -> None:
    with cluster(3) as nodes:
        stranger = nodes[0].start("python -u -m http.server 29500")
        try:
            deadline = time.monotonic() + 20
            while "Serving HTTP" not in nodes[0].output:
                assert time.monotonic() < deadline and stranger.poll() is None, nodes[0].output
                time.sleep(0.05)
            output = launch(nodes, tmp_path)
        finally:
            end([stranger])
    assert re.search(
        r"port 29500 of node 0 \(node0\) is held by process \d+ \(python -u -m http.server 29500\)", output
    )
    assert [name for name, state in states(output).items() if state == "FAILED"] == ["port"], output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "planted", "text"),
    [
        ("time.sleep(600)", 2, "preflight: 1 problem: rank 1 on node2 did not answer in time (describe)"),
        ("os.kill(os.getpid(), 9)", 2, "preflight: 1 problem: rank 1 on node2 ended (describe)"),
        ("os.kill(os.getpid(), 9)", 1, "preflight: 1 problem: rank 2 on node0 has lost rank 0 on node1"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named_and_ends_all(fault: str, planted: int, text: str, tmp_path: Path) -> None:
    """torchrun orders ranks by the addresses of the nodes. The head's is a name here, so it comes last."""
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import os, platform, time\nif 'RANK' in os.environ:\n    platform.python_version = lambda: {fault}\n"
    )
    with cluster(3) as nodes:
        before = f'export PYTHONPATH="{folder}:$PYTHONPATH"'
        launch(
            nodes,
            tmp_path / "runs",
            before=before,
            planted=planted,
            all_alive=False,
            ONEWORLD_PREFLIGHT_S="5",
        )
        assert text in nodes[0].output, nodes[0].output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fewer_nodes_may_begin_and_a_late_one_joins_them(tmp_path: Path) -> None:
    """With --nnodes 2:3 the head names the node it begins without. That node later joins the training of the others."""
    settings = [*SETTINGS, "train.num_steps=5000", "train.num_prompts_per_step=3", "eval.interval=0"]
    node = f"bash launch/run_node.sh --nnodes 2:3 --nproc 1 --head head --node-rank %N {' '.join(settings)}"
    launchers = []

    def wait_for(text: str, node: Node, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in node.output:
            assert time.monotonic() < deadline and launchers[-1].poll() is None, node.output
            time.sleep(0.1)

    with cluster(3) as nodes:

        def begin(number: int) -> None:
            launchers.append(nodes[number].start(f"{node.replace('%N', str(number))} run.dir={tmp_path}/{number}"))

        try:
            begin(0)
            begin(1)
            wait_for("begins without 1 of 3 nodes: node 2", nodes[0])
            wait_for("preflight: ready, 2 nodes, 2 ranks", nodes[0])
            while not any("step 2/" in node.output for node in nodes):
                time.sleep(0.1)
            begin(2)
            wait_for("head:29500 answers: it joins the others without preflight", nodes[2])
            while not any("3 ranks on 3 nodes" in node.output for node in nodes):
                time.sleep(0.1)
        finally:
            end(launchers)
            for one in nodes:
                one.kill()
