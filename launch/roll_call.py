"""Name missing nodes before torchrun starts. Its rendezvous would wait for them without a message.

    python launch/roll_call.py HEAD PORT NNODES NODE_RANK RUN TRAINING_PORT

launch/run_node.sh runs this on every node. NODE_RANK may be empty. The head listens on PORT and prints which nodes it
waits for. ONEWORLD_NODES may hold their names by rank. The other nodes introduce themselves. They print a line if they
cannot reach the head or if it has another secret. The exit codes are:

    0   all nodes have come, or enough of them with NNODES=MIN:MAX
    1   some are missing after ONEWORLD_PREFLIGHT_WAIT_S seconds (300), or the head has refused this node
    3   there is no roll call, but torchrun's rendezvous of this run answers on the training port: the other nodes are
        training already, and this node may join them
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.checks.sockets import (
    CONNECT_S,
    Acceptor,
    Name,
    Number,
    is_own_address,
    listen,
    read_messages,
    reason,
    send_message,
)
from rl.common.handshake import Untrusted, connect, derive_key
from rl.common.json_channel import JsonChannel
from rl.common.text import count_of

READY, NOT_READY, UNDER_WAY = 0, 1, 3
FIRST_REPORT_S, REPORT_S = 3.0, 15.0  # when missing nodes are reported
EXTRA_S = 10.0  # with --nnodes MIN:MAX, time for more nodes once MIN nodes have come
HEARTBEAT_S, SILENCE_S = 2.0, 20.0  # interval of the head's messages; silence after which it counts as dead
UNDER_WAY_S = 8.0  # a head may take this long from the end of the roll call until it opens the training port
STORE_S = 5.0  # time for a store to answer
PURPOSE = "roll call"  # the run's name is no part of the key, so that nodes of another run can be told so


class Node(NamedTuple):
    rank: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.rank is None else f"node {self.rank} ({self.name})"


class NodeHello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """Introduce a node to the head."""

    run: Name
    node: Number | None
    name: Name


class Wait(msgspec.Struct, frozen=True, tag_field="kind", tag="wait"):
    """Tell a node that the head is alive."""


class RollCallOutcome(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """Tell a node its exit code, and what to print."""

    code: Literal[0, 1]
    text: str


def say(text: str) -> None:
    print(f"oneworld: {text}", file=sys.stderr, flush=True)


def refusal(node: Node, present: Collection[Node], max_nodes: int) -> str:
    """Return why this node cannot take part, or an empty string."""
    rank, name = node
    if rank is not None and rank >= max_nodes:
        return f"got node rank {rank} in a launch of {count_of(max_nodes, 'node')}; give one from 0 to {max_nodes - 1}"
    if rank is not None and (holder := dict(present).get(rank, name)) != name:
        return f"got node rank {rank} from {name}, but {holder} has it; give each node its own rank"
    return ""


def describe_missing(present: Collection[Node], max_nodes: int, names: Sequence[str]) -> str:
    """Return `1 of 4 nodes: node 2 (gpu-03)`. Without ranks, name the nodes that are present instead."""
    text, ranks = f"{max_nodes - len(present)} of {max_nodes} nodes", {node.rank for node in present}
    if None in ranks:
        return f"{text}; present: {', '.join(sorted(node.name for node in present))}"
    absent = [rank for rank in range(max_nodes) if rank not in ranks]
    shown = [str(Node(rank, names[rank])) if rank < len(names) else f"node {rank}" for rank in absent[:8]]
    return f"{text}: {', '.join(shown)}" + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")


class RollCall:
    """The head's side: wait for the other nodes and tell them the outcome."""

    def __init__(self, server: socket.socket, head: Node, run: str, nnodes: str, names: Sequence[str] = ()):
        """`nnodes` is a number or MIN:MAX. `names` has the names of the nodes by rank, as far as they are known."""
        self._head, self._run, self._names = head, run, names
        self._min_nodes, self._max_nodes = int(nnodes.split(":")[0]), int(nnodes.split(":")[-1])
        self._acceptor = Acceptor(server, derive_key(PURPOSE), NodeHello)
        self._members: dict[JsonChannel, Node] = {}  # a node that connects again has two entries for a moment

    @property
    def present(self) -> set[Node]:
        return {self._head, *self._members.values()}

    def call(self, wait_s: float) -> int:
        """Wait until the nodes have come, and return the exit code."""
        try:
            return self._call(wait_s)
        finally:
            self.close()

    def close(self) -> None:
        self._acceptor.close()

    def _call(self, wait_s: float) -> int:
        begun = time.monotonic()
        next_report, next_heartbeat, enough_since = begun + FIRST_REPORT_S, begun, math.inf
        while (count := len(self.present)) < self._max_nodes:
            now, missing = time.monotonic(), describe_missing(self.present, self._max_nodes, self._names)
            enough_since = min(enough_since, now) if count >= self._min_nodes else math.inf
            if now > enough_since + EXTRA_S:
                say(f"the launch begins without {missing}")
                break
            if now > begun + wait_s:
                text = f"preflight: gave up after {wait_s:g} s (ONEWORLD_PREFLIGHT_WAIT_S) on {missing}"
                self._send_all("end", code=NOT_READY, text=text)
                say(f"{text}; read the launcher's output there, and check that this node can be reached from there")
                return NOT_READY
            if now > next_report:
                say(f"waiting for {missing}")
                next_report = now + REPORT_S
            if now > next_heartbeat:
                self._send_all("wait")
                next_heartbeat = now + HEARTBEAT_S
            self.step(timeout_s=0.5)
        self._send_all("end", code=READY, text="")
        return READY

    def step(self, timeout_s: float) -> None:
        """Wait for nodes that come or leave."""
        for channel, hello in self._acceptor.poll(timeout_s, self._members):
            node, run = Node(hello.node, hello.name), hello.run
            wrong = refusal(node, self.present, self._max_nodes)
            if run != self._run:
                text = f"got {node.name} of the run {run}, but this is the roll call of {self._run}"
                wrong = f"{text}; give one of the runs another --port"
            if wrong:
                say(wrong)
                channel.send("end", code=NOT_READY, text=wrong)
                channel.close()
            else:
                self._members[channel] = node
        for channel in [*self._members]:
            if channel.receive():
                say(f"{self._members[channel]} sent a message after its hello, so its connection is closed")
                channel.is_open = False
            if not channel.is_open:
                channel.close()
                del self._members[channel]

    def _send_all(self, kind: str, **values: Any) -> None:
        for channel in self._members:
            channel.send(kind, **values)


def answer(head: str, port: int, training_port: int, run: str, node: Node, wait_s: float) -> int:
    """Introduce this node to the head, and return the exit code that the head sends."""
    begun = time.monotonic()
    next_report, next_look = begun + FIRST_REPORT_S, begun + UNDER_WAY_S
    while True:
        try:
            with connect((head, port), derive_key(PURPOSE), CONNECT_S) as connection:
                send_message(connection, "hello", run=run, node=node.rank, name=node.name)
                connection.settimeout(SILENCE_S)
                messages = read_messages(connection, Wait | RollCallOutcome)
                outcome = next(message for message in messages if isinstance(message, RollCallOutcome))
            if outcome.text:
                say(outcome.text)
            return outcome.code
        except (OSError, ValueError) as error:
            trouble = reason(error)
            is_refused = isinstance(error, Untrusted)  # then the text has its own remedy
            remedy = "" if is_refused else "; start the head, or let this node reach that port"
        now = time.monotonic()
        if now > next_look and is_listening(head, training_port):
            if is_under_way(head, training_port, run):
                text = f"there is no roll call at {head}:{port}, but the rendezvous of {run} at {head}:{training_port}"
                say(f"{node}: {text} answers: it joins the others without preflight")
                return UNDER_WAY
            text = f"the listener at {head}:{training_port} is not the rendezvous of {run}"
            say(f"{node}: {text}; if it belongs to another run, give one of the runs another --port")
            next_look = time.monotonic() + REPORT_S
        if now > begun + wait_s:
            text = f"{node} could not reach the head at {head}:{port} within {wait_s:g} s (ONEWORLD_PREFLIGHT_WAIT_S)"
            say(f"preflight: {text}: {trouble}{remedy}")
            return NOT_READY
        if now > next_report:
            left = f"{begun + wait_s - now:.0f} s"
            say(f"{node} cannot reach the head at {head}:{port}: {trouble}; it retries for {left} more")
            next_report = now + REPORT_S
        time.sleep(0.3)  # poll, because nothing reports when a head begins to listen


def is_listening(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), timeout=CONNECT_S).close()
        return True
    return False


def is_under_way(head: str, training_port: int, run: str) -> bool:
    """Return whether torchrun's rendezvous of this run answers. Ask in another process, because torch may hang."""
    command = [sys.executable, __file__, "rendezvous", head, str(training_port), run, str(STORE_S)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def has_rendezvous(head: str, training_port: int, run: str, timeout_s: float) -> bool:
    """Return whether torchrun's rendezvous of this run answers. End the process if nothing answers in time."""
    from torch.distributed import TCPStore

    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM ends the process even inside torch
    store = TCPStore(head, training_port, is_master=False, wait_for_workers=False)
    return store.check([f"torch.rendezvous.{run}"])  # the key of torchrun's c10d backend


def main(head: str, port: int, nnodes: str, rank_text: str, run: str, training_port: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wait_s = float(os.environ.get("ONEWORLD_PREFLIGHT_WAIT_S", 300))
    rank, host = int(rank_text) if rank_text else None, socket.gethostname()
    node = Node(rank, f"{host} (process {os.getpid()})" if rank is None else host)
    if rank == 0 or (rank is None and is_own_address(head)):
        try:
            with listen(port) as server:
                names = os.environ.get("ONEWORLD_NODES", "").split()
                return RollCall(server, node, run, nnodes, names).call(wait_s)
        except OSError as error:
            if rank is not None:
                from launch.checks.host import port_holder

                text = f"port {port} of the head is held by {port_holder(port, error)}; end it, or give another --port"
                say(f"preflight: {text}: the roll call uses --port + 1, and --port is {training_port}")
                return NOT_READY
    return answer(head, port, training_port, run, node, wait_s)


if __name__ == "__main__":
    if sys.argv[1] == "rendezvous":
        head, training_port, run, seconds = sys.argv[2:]
        sys.exit(not has_rendezvous(head, int(training_port), run, float(seconds)))
    head, port, nnodes, rank, run, training_port = sys.argv[1:]
    sys.exit(main(head, int(port), nnodes, rank, run, int(training_port)))
