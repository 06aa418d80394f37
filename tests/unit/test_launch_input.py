"""The input of launchers: invalid numbers, lists of devices, and the verdict of preflight."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.launcher import ROOT
from tests.unit.test_launchers import SLURM, Machine, dstack_script

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end()


def test_bad_numbers_are_refused(machine: Machine) -> None:
    hosts = machine.folder / "hosts"
    hosts.write_text("alpha\n")
    ssh, shared = ["start", "one", "--hosts", str(hosts)], ["--shared", str(machine.folder)]
    for launcher, arguments, said in (
        ("run_node.sh", ["--nproc", "0"], "--nproc: got '0'; it is a whole number from 1 to 1024"),
        ("run_node.sh", ["--nproc", "abc"], "--nproc: got 'abc'; it is"),
        ("run_node.sh", ["--nnodes", "x", "--head", "h"], "--nnodes: got 'x'; it is a number of nodes from 1, or MIN:"),
        ("run_node.sh", ["--nnodes", "4:2", "--head", "h"], "--nnodes: got '4:2'; it is"),
        ("run_node.sh", ["--nnodes", "0"], "--nnodes: got '0'; it is"),
        ("run_node.sh", ["--port", "65535"], "--port: got '65535'; it is a whole number from 1 to 65534"),
        ("run_node.sh", ["--port", "abc"], "--port: got 'abc'; it is"),
        ("run_node.sh", ["--port", "0123"], "--port: got '0123'; it is"),
        ("run_node.sh", ["--node-rank", "foo"], "--node-rank: got 'foo'; it is a whole number from 0 to"),
        ("local.sh", ["--master", "--nnodes", "2", "--port", "abc", *shared], "--port: got 'abc'; it is"),
        ("local.sh", ["--worker", "0", *shared], "--worker: got '0'; it is a whole number from 1 to"),
        ("local.sh", ["--worker", "", *shared], "--worker: got ''; it is"),
        ("local.sh", ["--worker", "1", "--wait", "long", *shared], "--wait: got 'long'; it is a number of seconds"),
        ("ssh.sh", [*ssh, "--nproc", "0"], "--nproc: got '0'; it is"),
        ("ssh.sh", [*ssh, "--port", "70000"], "--port: got '70000'; it is"),
    ):
        output = machine.run(launcher, *arguments, code=2)
        assert output.startswith(f"oneworld: {said}") and output.count("\n") == 1, output
    assert machine.num_calls == 0
    assert "--nnodes 2:4 " in machine.run("run_node.sh", "--print", "--nnodes", "2:4", "--head", "h", "run.name=x")


def test_a_list_of_devices_ends_at_an_invalid_one(machine: Machine) -> None:
    wanted = ["--print", "placement.num_gpus_per_node=6"]
    for visible, num_ranks in (("-1", 6), ("NoDevFiles", 6), ("3,-1,5", 1)):
        output = machine.run("run_node.sh", *wanted, CUDA_VISIBLE_DEVICES=visible)
        assert f"--nproc-per-node {num_ranks} " in output, visible


def test_the_verdict_of_the_ranks_decides_preflight(machine: Machine) -> None:
    """torchrun may fail after the verdict, because another node's agent ended first."""
    del machine.environment["ONEWORLD_PREFLIGHT"]
    machine.script('echo 0 > "$ONEWORLD_PREFLIGHT_CODE"; exit 1', "exit 0")
    machine.run("run_node.sh")
    assert "train.py" in machine.call(2)


def test_arguments_go_to_train_py(machine: Machine) -> None:
    output = machine.run("run_node.sh", "--print", "--", "--dry-run", "--eval-only", code=2)
    assert "train.py: error: argument --eval-only: not allowed with argument --dry-run" in output


# A kernel without IPv6, for the program that follows.
WITHOUT_IPV6 = """import runpy, socket, sys
socket.has_dualstack_ipv6 = lambda: False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_head_without_ipv6_is_found(tmp_path: Path) -> None:
    """No large package is imported: workers on a slow disk would wait for it."""
    head = str(ROOT / "launch" / "find_head.py")
    command = [sys.executable, "-c", WITHOUT_IPV6, head, "serve", str(tmp_path), "7", "2", "0", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and (secret := server.stdout.readline().strip())
        find = [sys.executable, "-X", "importtime", head, "find", str(tmp_path), "5"]
        try:
            found = subprocess.run(find, capture_output=True, text=True, timeout=10)
        finally:
            server.terminate()
    assert found.stdout.split() == ["7", "2", "127.0.0.1", "0", secret]
    assert "rl.world.address" in found.stderr and "torch" not in found.stderr


def test_all_nodes_have_the_image_before_any_is_started(machine: Machine) -> None:
    """The roll call would not wait for a build."""
    on_nodes = 'while [ "$1" != "--chdir" ]; do shift; done; cd "$2" && shift 2; "$@" && "$@"'
    machine.program("srun", f"#!/bin/bash\n{on_nodes}\n")
    machine.program("scontrol", "#!/bin/bash\nprintf 'n%s\\n' 1 2\n")
    docker = 'echo "docker $1"; case $1 in image) exit 1 ;; build) exit "$(cat code)" ;; esac'
    machine.program("docker", f"#!/bin/bash\n{docker}\n")
    machine.environment |= SLURM | {"SLURM_SUBMIT_DIR": str(machine.root)}
    for code, parts in ((0, ["build", "build", "run", "run"]), (3, ["build"])):
        (machine.root / "code").write_text(str(code))
        output = machine.run("slurm_amd.sbatch", "--runtime", "docker", code=code)
        assert [line.split()[1] for line in output.splitlines() if line.startswith("docker")] == parts
    assert "image oneworld-rocm was not built on every node, so nothing was started" in output


def test_nodes_of_dstack_wait_for_the_setup_of_others(machine: Machine) -> None:
    task = yaml.safe_load((machine.root / "launch" / "dstack.yml").read_text())
    (machine.root / "launch" / "run_node.sh").write_text('#!/bin/bash\necho "$ONEWORLD_PREFLIGHT_WAIT_S"\n')
    script = f"cd {machine.root}; {dstack_script(machine, task)}"
    assert machine.shell(script) == "1800\n"
    assert machine.shell(f"ONEWORLD_PREFLIGHT_WAIT_S=5; {script}") == "5\n"
