"""Name missing nodes before torchrun starts. Its rendezvous would wait for them without a message.

    python launch/roll_call.py HEAD PORT NNODES NODE_RANK RUN TRAINING_PORT

launch/run_node.sh runs this on every node; NODE_RANK may be empty. The head listens on PORT and says which nodes it
waits for. The other nodes introduce themselves, and say so if they cannot reach the head. ONEWORLD_NODES may hold the
names of the nodes in the order of their ranks. If NNODES is MIN:MAX, the head waits EXTRA_S seconds for more nodes once
MIN nodes have come.

The exit code is the same on every node: 0 if the nodes have come, 1 if some are missing after ONEWORLD_PREFLIGHT_WAIT_S
seconds (300). But a node that comes late exits with 3, if there is no roll call any more and torchrun's rendezvous of
this run answers on the training port of the head. The other nodes are training already, and this one may join them.

    python launch/roll_call.py rendezvous HEAD TRAINING_PORT RUN SECONDS

exits with 0 if that rendezvous answers. This is a separate process, because torch's client waits forever for a listener
that never answers.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.checks.sockets import CONNECT_S, is_own_address, listen, reason
from rl.common.framing import FrameReader
from rl.common.json_channel import MAX_MESSAGE, JsonChannel
from rl.common.text import count_of

READY, NOT_READY, UNDER_WAY = 0, 1, 3
DEFAULT_WAIT_S = 300.0
FIRST_REPORT_S, REPORT_S = 3.0, 15.0  # when missing nodes are reported
EXTRA_S = 10.0
HEARTBEAT_S, SILENCE_S = 2.0, 20.0  # interval of the head's messages; silence after which it counts as dead
UNDER_WAY_S = 8.0  # a head may take this long from the end of the roll call until it opens the training port
STORE_S = 5.0  # time for a store to answer


def say(text: str) -> None:
    print(f"oneworld: {text}", file=sys.stderr, flush=True)


@dataclass
class Roll:
    """The nodes that are present, by rank, or by name if they have no ranks."""

    min_nodes: int
    max_nodes: int
    names: Sequence[str] = ()  # by rank, as far as they are known
    present: dict[int | str, str] = field(default_factory=dict)

    def enter(self, rank: int | None, name: str) -> str:
        """Add a node. Return why it is refused, or an empty string."""
        key = name if rank is None else rank
        if rank is not None and rank >= self.max_nodes:
            return f"got node rank {rank} in a launch of {count_of(self.max_nodes, 'node')}; ranks count from 0"
        if self.present.get(key, name) != name:
            return f"got node rank {rank} from {name}, but {self.present[key]} has it; give each node its own rank"
        self.present[key] = name
        return ""

    def leave(self, rank: int | None, name: str) -> None:
        self.present.pop(name if rank is None else rank, None)

    def missing(self) -> str:
        """Return `1 of 4 nodes: node 2 (gpu-03)`. Without ranks, name the nodes that are present instead."""
        text = f"{self.max_nodes - len(self.present)} of {self.max_nodes} nodes"
        if any(isinstance(key, str) for key in self.present):
            return f"{text}; present: {', '.join(sorted(self.present.values()))}"
        absent = [rank for rank in range(self.max_nodes) if rank not in self.present]
        shown = [f"node {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "") for rank in absent]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        return f"{text}: {', '.join(shown[:8])}{more}"


def parse_nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


class RollCall:
    """The head's side: wait for the other nodes and tell them the outcome."""

    def __init__(self, server: socket.socket, roll: Roll, run: str):
        self._server, self._roll, self._run = server, roll, run
        self._members: dict[JsonChannel, tuple[int | None, str] | None] = {}  # None until a node has introduced itself

    def call(self, wait_s: float) -> int:
        """Wait until the nodes have come, and return the exit code."""
        begun = time.monotonic()
        next_report, next_heartbeat, enough_at = begun + FIRST_REPORT_S, begun, None
        while (count := len(self._roll.present)) < self._roll.max_nodes:
            now = time.monotonic()
            if count >= self._roll.min_nodes and enough_at is None:
                enough_at = now
            if enough_at is not None and now > enough_at + EXTRA_S and count >= self._roll.min_nodes:
                say(f"begins without {self._roll.missing()}")
                break
            if now > begun + wait_s:
                text = f"preflight: gave up after {wait_s:g} s (ONEWORLD_PREFLIGHT_WAIT_S) on {self._roll.missing()}"
                self._send_all("end", code=NOT_READY, text=text)
                say(f"{text}; look at the output of its launcher, and whether it reaches this node")
                return NOT_READY
            if now > next_report:
                say(f"waiting for {self._roll.missing()}")
                next_report = now + REPORT_S
            if now > next_heartbeat:
                self._send_all("wait")
                next_heartbeat = now + HEARTBEAT_S
            self.step(timeout_s=0.5)
        self._send_all("end", code=READY, text="")
        return READY

    def step(self, timeout_s: float) -> None:
        """Wait for connections and messages, and bring the roll up to date."""
        connections = [channel.connection for channel in self._members]
        if self._server in select.select([self._server, *connections], [], [], timeout_s)[0]:
            self._members[JsonChannel(self._server.accept()[0])] = None
        for channel in [*self._members]:
            messages = channel.receive()
            if messages and self._members[channel] is None:  # a node sends only its hello
                self._meet(channel, messages[0])
            if not channel.is_open:
                node = self._members.pop(channel)
                channel.close()
                if node is not None and node not in self._members.values():  # otherwise it has connected again
                    self._roll.leave(*node)

    def _meet(self, channel: JsonChannel, hello: dict[str, Any]) -> None:
        if not {"run", "node", "name"} <= hello.keys():  # not from one of our nodes
            channel.close()
            return
        run, rank, name = hello["run"], hello["node"], hello["name"]
        if run != self._run:
            wrong = f"got {name} of the run {run}, but this is the roll call of {self._run}; give one another --port"
        else:
            wrong = self._roll.enter(rank, name)
        if wrong:
            say(wrong)
            channel.send("end", code=NOT_READY, text=wrong)
            channel.close()
        else:
            self._members[channel] = (rank, name)

    def _send_all(self, kind: str, **values: Any) -> None:
        for channel, node in self._members.items():
            if node is not None:
                channel.send(kind, **values)


def answer(head: str, port: int, training_port: int, hello: dict[str, Any], wait_s: float) -> int:
    """Introduce this node to the head, and return the exit code that the head sends."""
    who = hello["name"] if hello["node"] is None else f"node {hello['node']} ({hello['name']})"
    begun = time.monotonic()
    next_report, next_look = begun + FIRST_REPORT_S, begun + UNDER_WAY_S
    while True:
        try:
            with socket.create_connection((head, port), timeout=CONNECT_S) as connection:
                JsonChannel(connection).send("hello", **hello)
                connection.settimeout(SILENCE_S)
                reader = FrameReader(connection, MAX_MESSAGE)
                while (message := json.loads(reader.wait_for_frame().head))["kind"] != "end":
                    pass
            if message["text"]:
                say(message["text"])
            return message["code"]
        except (OSError, ValueError) as error:
            trouble = reason(error)
        now = time.monotonic()
        if now > next_look and _accepts(head, training_port):
            if _is_under_way(head, training_port, hello["run"]):
                say(
                    f"{who}: there is no roll call at {head}:{port}, but the rendezvous of {hello['run']} at "
                    f"{head}:{training_port} answers: joins the others without preflight"
                )
                return UNDER_WAY
            say(f"{who}: the listener at {head}:{training_port} is not the rendezvous of {hello['run']}")
            next_look = time.monotonic() + REPORT_S
        if now > begun + wait_s:
            say(
                f"preflight: {who} could not reach the head at {head}:{port} within {wait_s:g} s "
                f"(ONEWORLD_PREFLIGHT_WAIT_S): {trouble}; start the head, or let this node reach that port"
            )
            return NOT_READY
        if now > next_report:
            left = begun + wait_s - now
            say(f"{who} cannot reach the head at {head}:{port}: {trouble}; retries for {left:.0f} s more")
            next_report = now + REPORT_S
        time.sleep(0.3)  # poll, because nothing reports when a head begins to listen


def _accepts(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_S):
        return True
    return False


def _is_under_way(head: str, training_port: int, run: str) -> bool:
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
    wait_s = float(os.environ.get("ONEWORLD_PREFLIGHT_WAIT_S", DEFAULT_WAIT_S))
    names = os.environ.get("ONEWORLD_NODES", "").split()
    rank = int(rank_text) if rank_text else None
    own = socket.gethostname() if rank_text else f"{socket.gethostname()} (process {os.getpid()})"
    roll = Roll(*parse_nnodes(nnodes), names)
    if rank == 0 or (rank is None and is_own_address(head)):
        try:
            with listen(port) as server:
                roll.enter(rank, own)
                return RollCall(server, roll, run).call(wait_s)
        except OSError:
            if rank is not None:
                from launch.checks.host import port_holder

                say(
                    f"preflight: port {port} of the head is held by {port_holder(port)}; end it, or give another "
                    f"--port than {training_port}, which is one less"
                )
                return NOT_READY
    return answer(head, port, training_port, {"run": run, "node": rank, "name": own}, wait_s)


if __name__ == "__main__":
    if sys.argv[1] == "rendezvous":
        head, training_port, run, seconds = sys.argv[2:]
        sys.exit(not has_rendezvous(head, int(training_port), run, float(seconds)))
    head, port, nnodes, rank, run, training_port = sys.argv[1:]
    sys.exit(main(head, int(port), nnodes, rank, run, int(training_port)))
