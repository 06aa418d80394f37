"""How a launcher numbers a node and prepares its environment: NODE_RANK and RANK, --activate, --forward and TMPDIR."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.unit.test_launchers import SLURM, Machine, until

pytestmark = pytest.mark.timeout(30)
NUMBERS = ("RANK", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
# A host runs its script here, without the variables of this process.
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
exec env -i PATH=/usr/bin:/bin HOME={folder}/home-$2 bash -s
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    for name in NUMBERS:
        machine.environment.pop(name, None)
    yield machine
    machine.end()


# The number of a node


def test_the_same_command_starts_every_node(machine: Machine) -> None:
    """NODE_RANK, or else RANK, says which node is the head."""
    shared, port = machine.folder / "shared", str(free_port())
    machine.script(f"until [ -e {machine.folder}/end ]; do sleep 0.05; done", f"touch {machine.folder}/end")
    command = ["--nnodes", "2", "--shared", str(shared), "--nproc", "1", "--port", port, "run.name=x"]
    worker = machine.start("local.sh", *command, RANK="1")
    head = machine.start("local.sh", *command, NODE_RANK="0", RANK="0")
    outputs = [process.communicate(timeout=20)[0] for process in (head, worker)]
    assert (head.returncode, worker.returncode) == (0, 0), outputs
    assert "tells workers that the head is at" in outputs[0] and "tells workers" not in outputs[1]
    assert machine.call(1) == machine.call(2) and "--nnodes" in machine.call(1)


def test_an_option_wins_over_the_environment(machine: Machine) -> None:
    shared = ["--shared", str(machine.folder / "none")]
    output = machine.run("local.sh", "--worker", "1", *shared, "--wait", "0.1", code=1, RANK="0", NODE_RANK="x")
    assert "found no head in" in output
    output = machine.run("local.sh", "--master", "--nnodes", "2", *shared, "--print", "run.name=x", RANK="7")
    assert "--nnodes 2 " in output


def test_one_machine_ignores_the_environment(machine: Machine) -> None:
    machine.run("local.sh", "run.name=x", RANK="3", NODE_RANK="1", WORLD_SIZE="32")
    assert machine.call(1)[:2] == ["--nnodes", "1"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "--shared needs the number of this node; give --master or --worker R, or set NODE_RANK"),
        ({"RANK": "x"}, "RANK: got 'x'; it is a whole number from 0 to 999999"),
        ({"NODE_RANK": "-1"}, "NODE_RANK: got '-1'; it is a whole number from 0 to 999999"),
        (
            {"NODE_RANK": "1", "RANK": "2"},
            "NODE_RANK is 1, but RANK is 2; unset the one that is not the number of this",
        ),
        (
            {"RANK": "8", "LOCAL_RANK": "0"},
            "RANK is 8, but LOCAL_RANK is set too, so RANK numbers processes, not nodes",
        ),
        (
            {"NODE_RANK": "1", "LOCAL_RANK": "3"},
            "LOCAL_RANK is 3, so this is not the first process on this node; start",
        ),
        (
            {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE is 8, so several processes were started on this",
        ),
        ({"RANK": "8"}, "RANK is 8, but 4 nodes have the numbers 0 to 3; set NODE_RANK to the number of this node"),
        ({"RANK": "1", "WORLD_SIZE": "32"}, "WORLD_SIZE is 32, but there are 4 nodes, so RANK=1 may number processes"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(machine: Machine, variables: dict[str, str], said: str) -> None:
    shared = ["--shared", str(machine.folder), "--nnodes", "4"]
    output = machine.run("local.sh", *shared, code=2, **variables)
    assert output.startswith(f"oneworld: {said}") and output.count("\n") == 1, output
    assert machine.num_calls == 0


def test_a_scheduler_that_numbers_nodes_and_processes_is_understood(machine: Machine) -> None:
    """RANK numbers processes, and NODE_RANK wins."""
    shared = ["--shared", str(machine.folder / "none"), "--nnodes", "4", "--wait", "0.1"]
    scheduler = {"NODE_RANK": "3", "RANK": "24", "LOCAL_RANK": "0", "WORLD_SIZE": "32"}
    assert "found no head in" in machine.run("local.sh", *shared, code=1, **scheduler)


def test_a_number_that_the_head_does_not_expect_is_refused(machine: Machine) -> None:
    """A worker without --nnodes learns the number of nodes from the head."""
    shared, port = ["--shared", str(machine.folder / "shared")], str(free_port())
    machine.script(f"until [ -e {machine.folder}/end ]; do sleep 0.05; done")
    head = machine.start("local.sh", "--master", "--nnodes", "2", *shared, "--nproc", "1", "--port", port, "run.name=x")
    until(lambda: machine.num_calls == 1)
    assert "RANK is 8, but 2 nodes have the numbers 0 to 1" in machine.run("local.sh", *shared, code=2, RANK="8")
    output = machine.run("local.sh", *shared, "--nnodes", "3", code=2, NODE_RANK="1")
    assert "--nnodes is 3 here, but 2 on the head; give the same on every node" in output
    (machine.folder / "end").touch()
    assert head.communicate(timeout=15) and head.returncode == 0


# The environment of a node


@pytest.fixture
def nodes(machine: Machine) -> Iterator[Machine]:
    """Two hosts that have nothing of this environment. What torchrun needs comes from a file on each."""
    machine.program("fake-ssh", SSH.format(folder=machine.folder))
    machine.environment |= {"ONEWORLD_SSH": str(machine.bin / "fake-ssh"), "HF_TOKEN": "token"}
    (machine.folder / "hosts").write_text("alpha\nbeta\n")
    for host in ("alpha", "beta"):
        (machine.folder / f"home-{host}").mkdir()
    yield machine
    machine.run("ssh.sh", "stop", "one", ONEWORLD_STOP_S="0")


def write_activation(machine: Machine, path: Path, more: str = "") -> Path:
    needed = {name: machine.environment[name] for name in ("PATH", "PYTHONPATH")}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in needed.items()]
    path.write_text("\n".join([*lines, 'export ACTIVATED="$# arguments"', more]) + "\n")
    return path


def start(machine: Machine, *options: str) -> list[str]:
    return ["start", "one", "--hosts", str(machine.folder / "hosts"), "--nproc", "1", *options, "run.name=x"]


def test_ssh_sources_a_file_on_every_node(nodes: Machine) -> None:
    for host in ("alpha", "beta"):
        write_activation(
            nodes, nodes.folder / f"home-{host}" / "env.sh", "cat; cd /"
        )  # reads what ssh sends, if it can
    nodes.run("ssh.sh", *start(nodes, "--activate", "~/env.sh"))
    until(lambda: nodes.num_calls == 2)
    seen = nodes.seen()
    assert seen["ACTIVATED"] == "0 arguments", "the command is not its business"
    assert seen["HF_TOKEN"] == "token" and "TMPDIR" not in seen


def test_ssh_names_the_node_whose_file_fails(nodes: Machine) -> None:
    home = nodes.folder / "home-alpha"
    write_activation(nodes, home / "env.sh")
    missing = nodes.folder / "home-beta" / "env.sh"
    output = nodes.run("ssh.sh", *start(nodes, "--activate", "~/env.sh"), code=1)
    assert (
        f"oneworld: node 1 (beta): there is no file {missing} that can be read; --activate needs it on every" in output
    )
    assert "oneworld: node 1 (beta) was not started; stopping the others" in output
    for more, said in (("false", "returned status 1; --activate needs"), ("exit 0", "called exit; --activate needs")):
        write_activation(nodes, home / "env.sh", more)
        output = nodes.run("ssh.sh", *start(nodes, "--activate", "~/env.sh"), code=1)
        assert f"oneworld: node 0 (alpha): {home / 'env.sh'} {said}" in output
    assert "--activate needs a file, such as" in nodes.run("ssh.sh", *start(nodes, "--activate", ""), code=2)


def test_ssh_forwards_what_is_asked_for(nodes: Machine) -> None:
    path, temporary = nodes.environment["PATH"], nodes.folder / "temporary"
    temporary.mkdir()
    forward = ["--forward", "PATH", "--forward", "TMPDIR", "--forward", "PYTHONPATH"]
    nodes.run("ssh.sh", *start(nodes, *forward), TMPDIR=str(temporary))
    until(lambda: nodes.num_calls == 2)
    assert nodes.seen()["TMPDIR"] == str(temporary) and nodes.seen()["PATH"] == path
    output = nodes.run("ssh.sh", *start(nodes, "--forward", "NOT_SET"), code=2)
    assert "--forward NOT_SET: NOT_SET is not set here" in output
    output = nodes.run("ssh.sh", *start(nodes, "--forward", "A=b"), code=2)
    assert "--forward: got 'A=b'; it is the name of a variable" in output


def test_a_temporary_folder_that_the_node_lacks_is_named(machine: Machine) -> None:
    output = machine.run("run_node.sh", "run.name=x", code=2, TMPDIR="/nowhere")
    assert f"TMPDIR is /nowhere, which is no folder on {os.uname().nodename} that you can write to" in output
    assert machine.num_calls == 0


# Slurm

ON_NODE = '#!/bin/bash\nwhile [ "$1" != "--chdir" ]; do shift; done; cd "$2" && shift 2 && exec "$@"\n'


@pytest.fixture
def slurm(machine: Machine) -> Machine:
    machine.program("scontrol", '#!/bin/bash\nprintf "n%s\\n" 1\n')
    machine.program("srun", ON_NODE)
    machine.environment |= SLURM | {"SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(machine.root)}
    machine.environment |= {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
    return machine


def test_slurm_sources_a_file_before_the_run(slurm: Machine) -> None:
    file = write_activation(slurm, slurm.root / "env.sh")
    slurm.run("slurm.sbatch", "--activate", "env.sh", "run.name=x")
    assert slurm.num_calls == 1 and slurm.seen()["ACTIVATED"] == "0 arguments"
    file.unlink()
    output = slurm.run("slurm.sbatch", "--activate", "env.sh", "run.name=x", code=2)
    assert f"oneworld: node 0 (n1): there is no file {file} that can be read" in output and slurm.num_calls == 1


def test_slurm_sources_a_file_before_the_container(slurm: Machine) -> None:
    shown = slurm.run("slurm.sbatch", "--print", "--activate", "e.sh", "--runtime", "apptainer", "--image", "i.sif")
    assert " launch/activate.sh e.sh bash -c " in shown.splitlines()[0]
    pyxis = ["--print", "--activate", "e.sh", "--runtime", "pyxis", "--image", "i", "--forward", "TMPDIR"]
    shown = slurm.run("slurm.sbatch", *pyxis, "--forward", "PATH", TMPDIR=str(slurm.folder))
    words = shlex.split(shown.splitlines()[0])
    assert words[words.index("--container-env") + 1] == "TMPDIR,PATH"
    assert words.index("--container-image") < words.index("launch/activate.sh")


def test_slurm_forwards_into_containers(slurm: Machine) -> None:
    slurm.program("apptainer", '#!/bin/bash\necho "container has $APPTAINERENV_TMPDIR"\n')
    options = ["--runtime", "apptainer", "--image", "i.sif", "--forward", "TMPDIR"]
    assert f"container has {slurm.folder}" in slurm.run("slurm.sbatch", *options, TMPDIR=str(slurm.folder))
    enroot = ["--print", "--runtime", "enroot", "--image", "i", "--forward", "TMPDIR"]
    assert " --env TMPDIR " in slurm.run("slurm.sbatch", *enroot, TMPDIR=str(slurm.folder))


def test_slurm_amd_has_both(slurm: Machine) -> None:
    slurm.program("docker", '#!/bin/bash\necho "docker $*"\n[ -n "$ACTIVATED" ]\n')
    (slurm.root / "env.sh").write_text("export ACTIVATED=1\n")
    options = ["--runtime", "docker", "--forward", "TMPDIR", "--activate", "env.sh"]
    output = slurm.run("slurm_amd.sbatch", *options, "run.name=x", TMPDIR=str(slurm.folder))
    assert "docker run " in output and " --env TMPDIR " in output
    options[-1] = "none.sh"
    output = slurm.run("slurm_amd.sbatch", *options, "run.name=x", TMPDIR=str(slurm.folder), code=2)
    assert "oneworld: node 0 (n1): there is no file" in output and "docker" not in output
    assert "none.sh was not sourced, or image oneworld-rocm was not built on every node, so nothing was" in output
