"""Who is there, before torchrun is started: its rendezvous waits for missing nodes without a word.

    python launch/roll_call.py HEAD PORT NNODES NODE_RANK RUN TRAINING_PORT

on every node, with what launch/run_node.sh knows; NODE_RANK may be empty. The head listens at PORT and says whom it
waits for; the others tell it who they are, and say so when they cannot reach it. ONEWORLD_NODES names the nodes in the
order of their ranks, where a launcher knows them. NNODES may be MIN:MAX: then those that come within EXTRA_S of the
first MIN count.

Ends with 0 on every node when all are there, and with 1 on every node when they were not within
ONEWORLD_PREFLIGHT_WAIT_S seconds (300). With 3 where nobody calls the roll but torchrun's rendezvous of this run is at
the head's training port: the others have been through this and are at work, and this node may join them.

    python launch/roll_call.py rendezvous HEAD TRAINING_PORT RUN SECONDS

ends with 0 where that is so. A process of its own: torch's client waits without end for a listener that says nothing.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.checks.sockets import CONNECT_S, is_own_address, listen, reason
from rl.watch.text import count_of

READY, NOT_READY, UNDER_WAY = 0, 1, 3
DEFAULT_WAIT_S = 300.0
FIRST_WORD_S, WORD_S = 3.0, 15.0  # when it is said who is missing
EXTRA_S = 10.0
BEAT_S, SILENCE_S = 2.0, 20.0  # of a head that lives, and of one that does not
UNDER_WAY_S = 8.0  # so long a head may take from one port to the other
STORE_S = 5.0  # for a store to answer
MAX_HELLO = 1 << 16


def say(text: str) -> None:
    print(f"oneworld: {text}", file=sys.stderr, flush=True)


@dataclass
class Roll:
    """Who is there, by rank, or by name where a node knows no rank."""

    min_nodes: int
    max_nodes: int
    names: Sequence[str] = ()  # by rank, as far as they are known
    here: dict[int | str, str] = field(default_factory=dict)

    def enter(self, rank: int | None, name: str) -> str:
        """What is wrong with it; empty: nothing."""
        key = name if rank is None else rank
        if rank is not None and rank >= self.max_nodes:
            return f"got node rank {rank} in a launch of {count_of(self.max_nodes, 'node')}; ranks count from 0"
        if self.here.get(key, name) != name:
            return f"node {rank} is {self.here[key]} already, and so says {name}; give each a rank of its own"
        self.here[key] = name
        return ""

    def leave(self, rank: int | None, name: str) -> None:
        self.here.pop(name if rank is None else rank, None)

    @property
    def is_enough(self) -> bool:
        return len(self.here) >= self.min_nodes

    @property
    def is_complete(self) -> bool:
        return len(self.here) >= self.max_nodes

    def missing(self) -> str:
        """`1 of 4 nodes: node 2 (gpu-03)`; without ranks it can only be said who is there."""
        count = self.max_nodes - len(self.here)
        text = f"{count} of {self.max_nodes} nodes"
        if any(isinstance(key, str) for key in self.here):
            return f"{text}; here: {', '.join(sorted(self.here.values()))}"
        absent = [rank for rank in range(self.max_nodes) if rank not in self.here]
        shown = [f"node {rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "") for rank in absent]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        return f"{text}: {', '.join(shown[:8])}{more}"


def parse_nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


class Caller:
    """The head."""

    def __init__(self, server: socket.socket, roll: Roll, run: str):
        self._server, self._roll, self._run = server, roll, run
        self._parts: dict[socket.socket, bytes] = {}  # of whom nothing is known yet
        self._known: dict[socket.socket, tuple[int | None, str]] = {}

    def call(self, wait_s: float) -> int:
        begun = time.monotonic()
        next_word, next_beat, enough_at = begun + FIRST_WORD_S, begun, None
        while not self._roll.is_complete:
            now = time.monotonic()
            if self._roll.is_enough and enough_at is None:
                enough_at = now
            if enough_at is not None and now > enough_at + EXTRA_S and self._roll.is_enough:
                say(f"begins without {self._roll.missing()}")
                break
            if now > begun + wait_s:
                text = f"preflight: gave up after {wait_s:g} s (ONEWORLD_PREFLIGHT_WAIT_S) on {self._roll.missing()}"
                self._tell(end=NOT_READY, text=text)
                say(f"{text}; look at what its launcher says, and whether it reaches this node")
                return NOT_READY
            if now > next_word:
                say(f"waiting for {self._roll.missing()}")
                next_word = now + WORD_S
            if now > next_beat:
                self._tell(wait=True)
                next_beat = now + BEAT_S
            self._step(timeout_s=0.5)
        self._tell(end=READY, text="")
        return READY

    def _step(self, timeout_s: float) -> None:
        for ready in select.select([self._server, *self._parts, *self._known], [], [], timeout_s)[0]:
            if ready is self._server:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._parts[connection] = b""
            else:
                self._read(ready)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if connection in self._known:
            if not data:
                who = self._known.pop(connection)
                connection.close()
                if who not in self._known.values():  # else it has come again before this connection ended
                    self._roll.leave(*who)
            return
        self._parts[connection] += data
        part = self._parts[connection]
        if not data or len(part) > MAX_HELLO:
            del self._parts[connection]
            connection.close()
        elif b"\n" in part:
            del self._parts[connection]
            self._meet(connection, part.partition(b"\n")[0])

    def _meet(self, connection: socket.socket, line: bytes) -> None:
        try:
            hello = json.loads(line)
            run, rank, name = hello["run"], hello["node"], hello["name"]
        except (ValueError, KeyError, TypeError):  # a stranger
            connection.close()
            return
        if run != self._run:
            wrong = f"got {name} of the run {run}, but here the roll of {self._run} is called; give one another --port"
        else:
            wrong = self._roll.enter(rank, name)
        if wrong:
            say(wrong)
            _send(connection, end=NOT_READY, text=wrong)
            connection.close()
        else:
            self._known[connection] = (rank, name)

    def _tell(self, **message: object) -> None:
        for connection in self._known:
            _send(connection, **message)
            if "end" in message:
                connection.close()


def _send(connection: socket.socket, **message: object) -> None:
    with suppress(OSError):  # a lost one is seen when it is read from
        connection.send(json.dumps(message).encode() + b"\n")


def answer(head: str, port: int, training_port: int, hello: dict[str, object], wait_s: float) -> int:
    """Of every other node."""
    who = hello["name"] if hello["node"] is None else f"node {hello['node']} ({hello['name']})"
    begun = time.monotonic()
    next_word, next_look = begun + FIRST_WORD_S, begun + UNDER_WAY_S
    while True:
        trouble = "it ended the connection"
        try:
            with socket.create_connection((head, port), timeout=CONNECT_S) as connection:
                connection.settimeout(SILENCE_S)
                connection.sendall(json.dumps(hello).encode() + b"\n")
                for line in connection.makefile():
                    message = json.loads(line)
                    if "end" in message:
                        if message["text"]:
                            say(message["text"])
                        return message["end"]
        except (OSError, ValueError) as error:
            trouble = reason(error)
        now = time.monotonic()
        if now > next_look and _accepts(head, training_port):
            if _is_under_way(head, training_port, str(hello["run"])):
                say(
                    f"{who}: nobody calls the roll at {head}:{port}, but the rendezvous of {hello['run']} at "
                    f"{head}:{training_port} answers: joins the others without preflight"
                )
                return UNDER_WAY
            say(f"{who}: what listens at {head}:{training_port} is not the rendezvous of {hello['run']}")
            next_look = time.monotonic() + WORD_S
        if now > begun + wait_s:
            say(
                f"preflight: {who} could not reach the head at {head}:{port} within {wait_s:g} s "
                f"(ONEWORLD_PREFLIGHT_WAIT_S): {trouble}; start the head, or let this node reach that port"
            )
            return NOT_READY
        if now > next_word:
            say(f"{who} cannot reach the head at {head}:{port}: {trouble}; tries for {begun + wait_s - now:.0f} s more")
            next_word = now + WORD_S
        time.sleep(0.3)  # nothing tells when a head begins to listen


def _accepts(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_S):
        return True
    return False


def _is_under_way(head: str, training_port: int, run: str) -> bool:
    command = [sys.executable, __file__, "rendezvous", head, str(training_port), run, str(STORE_S)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def has_rendezvous(head: str, training_port: int, run: str, timeout_s: float) -> bool:
    """Ends the process where nothing is said in time."""
    from torch.distributed import TCPStore

    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM, which nobody handles, ends it inside of torch too
    store = TCPStore(head, training_port, is_master=False, wait_for_workers=False)
    return store.check([f"torch.rendezvous.{run}"])  # as torchrun's c10d backend names it


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
                return Caller(server, roll, run).call(wait_s)
        except OSError:
            if rank is not None:
                from launch.checks.host import port_holder

                say(
                    f"preflight: port {port} of the head is held by {port_holder(port)}; end it, or give another "
                    f"--port than {training_port}, which this is next to"
                )
                return NOT_READY
    return answer(head, port, training_port, {"run": run, "node": rank, "name": own}, wait_s)


if __name__ == "__main__":
    if sys.argv[1] == "rendezvous":
        head, training_port, run, seconds = sys.argv[2:]
        sys.exit(not has_rendezvous(head, int(training_port), run, float(seconds)))
    head, port, nnodes, rank, run, training_port = sys.argv[1:]
    sys.exit(main(head, int(port), nnodes, rank, run, int(training_port)))
