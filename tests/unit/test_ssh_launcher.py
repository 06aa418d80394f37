"""launch/ssh.sh with a fake ssh: unreachable nodes and Ctrl-C. tests/e2e/test_launch_ssh.py uses a real sshd."""

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_launchers import Machine, until

pytestmark = pytest.mark.timeout(30)

# What a host is told is done here; FOLDER/HOST says what it does instead, once.
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
[ "$1" = -- ] && shift || exit 64
if [ -e {folder}/$1 ]; then script=$(cat {folder}/$1); rm {folder}/$1; eval "$script"; fi
exec bash -s
"""
WORK = "trap 'exit 1' TERM; while :; do sleep 0.05; done"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    machine.program("fake-ssh", SSH.format(folder=tmp_path))
    machine.environment |= {"ONEWORLD_SSH": str(machine.bin / "fake-ssh")}
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    yield machine
    machine.run("ssh.sh", "stop", "one", ONEWORLD_STOP_S="0")
    machine.end()


def start(nodes: Machine) -> list[str]:
    return ["start", "one", "--hosts", str(nodes.folder / "hosts"), "--nproc", "1", "run.name=x"]


def test_an_unreachable_node_is_named_and_the_others_are_asked(nodes: Machine) -> None:
    nodes.script(WORK, WORK)
    nodes.run("ssh.sh", *start(nodes))
    (nodes.folder / "beta").write_text("exit 255")
    said = nodes.run("ssh.sh", "status", "one", code=255).splitlines()
    assert len(said) == 2 and said[0].startswith("[0 alpha] runs, process ") and said[1] == "[1 beta] cannot be reached"


def test_a_command_on_every_node_or_on_one(nodes: Machine) -> None:
    nodes.run("ssh.sh", *start(nodes))
    said = nodes.run("ssh.sh", "run", "one", "basename $PWD").splitlines()
    assert sorted(said) == ["[0 alpha] repository", "[1 beta] repository"]
    assert nodes.run("ssh.sh", "run", "one", "--node", "1", "exit 7", code=7) == ""
    assert "--node 2: one has nodes 0 to 1" in nodes.run("ssh.sh", "run", "one", "--node", "2", "true", code=2)
    assert "run needs a command" in nodes.run("ssh.sh", "run", "one", code=2)


def test_ctrl_c_during_the_start_stops_the_nodes_that_run(nodes: Machine) -> None:
    nodes.script(WORK)
    reached = nodes.folder / "reached"
    (nodes.folder / "beta").write_text(f"touch {shlex.quote(str(reached))}; exec sleep 20")
    process = nodes.start("ssh.sh", *start(nodes))
    until(reached.exists)
    until(lambda: nodes.num_calls == 1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == 130, output
    assert "[0 alpha] ended with status 143" in output and "[1 beta] was lost" in output


def test_a_line_that_is_no_host_is_refused(nodes: Machine) -> None:
    nodes.run("ssh.sh", *start(nodes))
    hosts = nodes.folder / "hosts"
    for line in ("gpu-01 slots=8", "-oProxyCommand=touch", "-l@alpha", "alpha/", "me@"):
        hosts.write_text(f"# the head\nalpha\n  {line} \r\n")
        output = nodes.run("ssh.sh", "start", "two", "--hosts", str(hosts), code=2)
        assert f"{hosts}, line 3: '{line}' is no host; give HOST or user@HOST alone" in output


def test_it_works_from_any_directory(nodes: Machine) -> None:
    nodes.script(WORK)
    (nodes.folder / "beta").write_text("exit 255")
    words = shlex.join(["bash", "ssh.sh", *start(nodes)])
    output = nodes.shell(f"cd {nodes.root}/launch; {words}", code=1)
    assert "node 1 (beta) was not started" in output and "[0 alpha] ended with status 143" in output
    assert "launch/local.sh" in nodes.shell(f"cd {nodes.root}/launch; bash local.sh --help")


@pytest.mark.parametrize("what", ["a file in its place", "a full disk", "nothing was started"])
def test_a_node_that_cannot_write_is_named(nodes: Machine, what: str) -> None:
    other = nodes.folder / "other"
    (other / "launch").mkdir(parents=True)
    (other / "launch" / "run_node.sh").touch()
    if what == "a file in its place":
        (other / "runs").touch()
    elif what == "a full disk":
        (other / "runs/.clusters/one").mkdir(parents=True)
        (other / "runs/.clusters/one/0.new").symlink_to("/dev/full")
    else:
        nodes.program("setsid", "#!/bin/bash\nexit 1\n")
    output = nodes.run("ssh.sh", *start(nodes)[:4], "--dir", str(other), code=1)
    assert f"cannot write in {other}/runs/.clusters/one; make room" in output
    assert "node 0 (alpha) was not started" in output
