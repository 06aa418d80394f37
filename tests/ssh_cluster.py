"""Nodes of tests/cluster.py with a real sshd on each, one shared repository, and separate run folders."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster import Node, cluster
from tests.launcher import ROOT
from tests.sshd import CACHE, find_sshd, libraries, sshd_script, write_files

PORT = 22  # each node has all ports to itself


def copy_repository(folder: Path) -> Path:
    """Copy the repository, with an environment in .venv as after `make setup`, so that the test has its own runs/."""
    for part in ("configs", "launch", "rl", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    (folder / ".venv" / "bin").mkdir(parents=True)
    search = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    lines = [f"export PATH={Path(sys.executable).parent}:$PATH", f"export PYTHONPATH={shlex.quote(search)}"]
    (folder / ".venv" / "bin" / "activate").write_text("\n".join(lines) + "\n")
    return folder


class SshCluster:
    """A cluster with ssh. `desk` is the user's own machine. `runs` is a path that each node mounts its own folder on:
    `disks[K]` on node K."""

    def __init__(self, folder: Path, nodes: list[Node], desk: Node):
        self.nodes, self.desk = nodes, desk
        self.repository, self.runs = copy_repository(folder / "repository"), folder / "runs"
        self.disks = [folder / node.name for node in nodes]
        self.hosts = folder / "hosts"
        self.hosts.write_text("".join(f"{node.name}\n" for node in nodes))
        self._folder = folder

    def start(self, sshd: Path) -> None:
        write_files(self._folder, "0.0.0.0", PORT, PORT)
        self.runs.mkdir()
        own_libraries = [f"{name}={value}" for name, value in libraries(CACHE).items() if sshd.is_relative_to(CACHE)]
        server = ["env", *own_libraries, str(sshd), "-D", "-e", "-f", f"{self._folder}/sshd_config"]
        for node, disk in zip(self.nodes, self.disks, strict=True):
            disk.mkdir()
            script = f"mount --bind {disk} {self.runs}; {sshd_script(self._folder)}"
            node.start(shlex.join(["sh", "-c", script, "sh", *server]))
        deadline = time.monotonic() + 20
        while not all("Server listening" in node.output for node in self.nodes):
            assert time.monotonic() < deadline, "\n".join(node.output for node in self.nodes)
            time.sleep(0.02)

    def at_desk(self, *words: str | Path) -> list[str]:
        """Return a command of the repository, as the user types it at the desk."""
        ssh = f"ssh -F {self._folder}/ssh_config -i {self._folder}/identity"
        settings = f"export ONEWORLD_PREFLIGHT=0 ONEWORLD_SSH={shlex.quote(ssh)}; cd {self.repository}"
        return self.desk.enter(f"bash -c {shlex.quote(f'{settings}; exec {shlex.join(map(str, words))}')}")

    def processes(self) -> list[list[str]]:
        """Return the names of the processes on each node, without sshd."""
        found = []
        for node in self.nodes:
            names = []
            for pid in node.pids():
                try:
                    names.append(psutil.Process(pid).name())
                except psutil.NoSuchProcess:
                    continue
            found.append([name for name in names if not name.startswith("sshd")])
        return found


@contextmanager
def ssh_cluster(folder: Path, num_nodes: int) -> Iterator[SshCluster]:
    """Start a cluster. Skip the test, with the reason, if there is no sshd or no permission for namespaces."""
    sshd, reason = find_sshd()
    if sshd is None or os.getuid():
        pytest.skip(reason or "nodes as network namespaces need root")
    with cluster(num_nodes + 1) as machines:
        try:
            nodes = SshCluster(folder, machines[:-1], machines[-1])
            nodes.start(sshd)
            yield nodes
        finally:
            for machine in machines:
                machine.kill()
