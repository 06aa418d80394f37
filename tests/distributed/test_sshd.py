"""The ssh server of the tests works, so that a failure through it is one of the tool under test."""

import getpass
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launcher import command_of, until
from tests.sshd import SshServer, ssh_server

MIB = 1 << 20
OVERHEAD = 64 << 10  # of ssh's packets and greeting, for a few MiB


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with ssh_server(tmp_path) as server:
        yield server


def ssh(server: SshServer, command: str, host: str = "node1", identity: Path | None = None) -> tuple[int, bytes, str]:
    """Return exit status, output and messages, as the tool would see them."""
    arguments = ["-i", str(identity or server.identity), "-o", "BatchMode=yes", f"{getpass.getuser()}@{host}", command]
    result = subprocess.run([*shlex.split(server.command), *arguments], capture_output=True, timeout=20)
    return result.returncode, result.stdout, result.stderr.decode()


@pytest.mark.parametrize("host", ["node0", "node9", "127.0.0.1"])
def test_runs_a_command_and_passes_its_status_on(server: SshServer, host: str) -> None:
    assert ssh(server, "whoami; exit 7", host) == (7, f"{getpass.getuser()}\n".encode(), "")
    assert "Accepted publickey" in server.log()


def test_a_session_reads_no_startup_file_of_this_machine(server: SshServer) -> None:
    assert ssh(server, "echo $HOME") == (0, f"{server.identity.parent}\n".encode(), "")


def test_refuses_the_other_key_at_once(server: SshServer) -> None:
    began = time.monotonic()
    status, output, messages = ssh(server, "whoami", identity=server.other_identity)
    assert (status, output) == (255, b"")
    assert "Permission denied (publickey)" in messages
    assert time.monotonic() - began < 20
    assert "Accepted" not in server.log()


def test_a_cut_transfer_can_be_resumed_and_its_bytes_are_counted(server: SshServer, tmp_path: Path) -> None:
    data = os.urandom(4 * MIB)
    (tmp_path / "data").write_bytes(data)
    server.cut(after_bytes=MIB)
    assert ssh(server, f"ls {tmp_path}/data")[0] == 0  # too short to be cut
    before = server.num_bytes
    status, first, _ = ssh(server, f"cat {tmp_path}/data")
    assert status == 255
    assert server.num_bytes - before == MIB
    assert MIB - OVERHEAD < len(first) < MIB

    before = server.num_bytes
    status, rest, messages = ssh(server, f"tail -c +{len(first) + 1} {tmp_path}/data")
    assert status == 0, messages
    assert first + rest == data
    assert len(rest) < server.num_bytes - before < len(rest) + OVERHEAD


def test_goes_away_and_comes_back_on_the_same_port(server: SshServer) -> None:
    server.stop()
    status, _, messages = ssh(server, "true")
    assert status == 255
    assert f"port {server.port}: Connection refused" in messages
    server.start()
    assert ssh(server, "echo back")[1] == b"back\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root has the process namespace that holds what a session detaches")
def test_leaves_no_process(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))  # of other tests

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - before

    with ssh_server(tmp_path) as server:
        ssh(server, "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
        until(lambda: any("sleep" in command_of(process) for process in started()), "the command of the session")
        tree = started()
    assert psutil.wait_procs(tree, timeout=10)[1] == []
