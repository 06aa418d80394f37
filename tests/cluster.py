"""A cluster on one machine. Nodes are network namespaces with host names of their own, joined by a switch.

Needs root and iproute2. All traffic stays inside the namespaces.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.launcher import ROOT, activated_environment

SUBNET = "10.77.0"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Node:
    """One node. It sees the folder `shared_memory` as /dev/shm."""

    def __init__(self, index: int, namespace: str, switch: str, shared_memory: Path):
        self.name, self.shared_memory = f"node{index}", shared_memory
        self.namespace, self._switch, self._port = namespace, switch, f"port{index}"
        self.log = tempfile.NamedTemporaryFile("a+", suffix=f".{self.name}.log")  # noqa: SIM115

    def enter(self, command: str) -> list[str]:
        """Return the command that runs a shell command on this node."""
        inside = f"mount --bind {self.shared_memory} /dev/shm && hostname {self.name} && exec {command}"
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "bash", "-c", inside]

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Run a command in the activated environment, with its output in a file."""
        return subprocess.Popen(
            self.enter(command),
            cwd=ROOT,
            env=activated_environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text()

    def cut_off(self) -> None:
        """Pull the node's network cable: no connection is closed."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def connect(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def pids(self) -> list[int]:
        """Return the ids of all processes on the node."""
        return [int(pid) for pid in subprocess.check_output(["ip", "netns", "pids", self.namespace], text=True).split()]

    def kill(self) -> None:
        """Kill all processes of the node, and empty its shared memory."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for path in self.shared_memory.iterdir():
            path.unlink()


def _hosts(num_nodes: int, own: int) -> str:
    """Return /etc/hosts as Debian writes it: a node's own name is 127.0.1.1, which no other node can reach."""
    lines = ["127.0.0.1 localhost"]
    for index in range(num_nodes):
        address = "127.0.1.1" if index == own else f"{SUBNET}.{index + 1}"
        lines.append(f"{address} node{index}{' head' if index == 0 else ''}")
    return "\n".join(lines) + "\n"


@contextmanager
def cluster(num_nodes: int) -> Iterator[list[Node]]:
    """Create nodes, and delete them at the end. The first one is also named `head`."""
    names = [f"ow{os.getpid()}n{index}" for index in range(num_nodes)]
    switch = f"ow{os.getpid()}sw"
    with ExitStack() as stack:
        for name in [switch, *names]:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for index, name in enumerate(names):
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{index}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{index}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            folder = Path("/etc/netns") / name  # `ip netns exec` mounts these files over those in /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(_hosts(num_nodes, index))
            stack.callback(folder.rmdir)
            stack.callback((folder / "hosts").unlink)
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        for name in names:
            (memory / name).mkdir()
        yield [Node(index, name, switch, memory / name) for index, name in enumerate(names)]


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill what is left of the commands, each of which leads a session of its own."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()
