"""Let rank 0 ask all ranks questions, in JSON messages over one TCP connection per rank.

There are no collectives. So a rank that dies or hangs can be named, and delays the others only until a deadline.
"""

import ipaddress
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from launch.checks.sockets import (
    CONNECT_S,
    Acceptor,
    Name,
    Number,
    check,
    read_messages,
    send_message,
)
from rl.common import handshake
from rl.common.json_channel import JsonChannel
from rl.common.text import format_ranks
from rl.common.waiting import wait_until_readable

ANSWER_S = 8.0  # default limit for the answers to a question
UNTRUSTED_S = 5.0  # a rank gives up after rank 0 has refused its secret for this long
PURPOSE = "preflight"


class RankHello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """Introduce a rank. With `prints`, it asks to print the final text."""

    rank: Number
    host: Name
    prints: bool


class Note(msgspec.Struct, frozen=True, tag_field="kind", tag="note"):
    """Tell rank 0 what a rank is doing now."""

    text: str


class Answer(msgspec.Struct, frozen=True, tag_field="kind", tag="answer"):
    number: int
    value: Any


class Failure(msgspec.Struct, frozen=True, tag_field="kind", tag="failed"):
    """Tell rank 0 why there is no answer."""

    number: int
    text: str


class Welcome(msgspec.Struct, frozen=True, tag_field="kind", tag="welcome"):
    """Tell a rank that it was accepted, and the host of rank 0."""

    host: Name


class Question(msgspec.Struct, frozen=True, tag_field="kind", tag="ask"):
    number: int
    question: str
    arguments: dict[str, Any]


class End(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """Tell a rank to end its process (`end_process`)."""

    code: int
    text: str
    all_alive: bool


class NoAnswer(Exception):
    """Some ranks failed, ended, or did not answer in time."""


class Coordinator:
    """Rank 0's side: wait for all ranks, ask them, and end them. `deadline` limits all questions together."""

    def __init__(self, server: socket.socket, num_ranks: int, answer_types: Mapping[str, Any] | None = None):
        """`answer_types` has the type of the answer by question. For other questions, any answer is accepted."""
        self._acceptor = Acceptor(server, handshake.derive_key(PURPOSE), RankHello)
        self.num_ranks, self._answer_types = num_ranks, answer_types or {}
        self._channels: dict[int, JsonChannel] = {}
        self._hellos: dict[int, RankHello] = {}
        self._notes: dict[int, str] = {}
        self._number, self.deadline = 0, float("inf")

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until every rank has introduced itself."""
        deadline = time.monotonic() + timeout_s
        while missing := sorted(set(range(self.num_ranks)) - self._channels.keys()):
            left = deadline - time.monotonic()
            if left < 0:
                text = f"{format_ranks(missing)} did not reach rank 0 on {socket.gethostname()} within {timeout_s:g} s"
                raise NoAnswer(f"{text}; their output says why. Every node must reach every other on any TCP port")
            for channel, hello in self._acceptor.poll(left):
                rank = hello.rank
                if rank in range(self.num_ranks) and rank not in self._channels:
                    self._channels[rank], self._hellos[rank] = channel, hello
                    channel.send("welcome", host=socket.gethostname())
                else:
                    last = self.num_ranks - 1
                    trouble = "is connected already" if rank in self._channels else f"is above the last rank, {last}"
                    print(f"preflight: refused {hello.host} as rank {rank}, which {trouble}", file=sys.stderr)
                    channel.close()
        self._acceptor.close()

    def addresses(self) -> dict[int, str]:
        """Return the address at which other nodes reach each rank: the one that its connection came from."""
        connections = {rank: channel.connection for rank, channel in self._channels.items()}
        peers = {rank: each.getpeername()[0].removeprefix("::ffff:") for rank, each in connections.items()}
        local = [rank for rank, peer in peers.items() if ipaddress.ip_address(peer).is_loopback]
        # A rank on this node connects over the loopback. Other nodes reach it at the address where they reached rank 0.
        here = [connections[rank].getsockname()[0].removeprefix("::ffff:") for rank in peers if rank not in local]
        return peers | (dict.fromkeys(local, here[0]) if here else {})

    def ask(self, question: str, arguments: Mapping[int, Any], timeout_s: float = ANSWER_S) -> dict[int, Any]:
        """Ask the ranks in `arguments` and return their answers. Raise NoAnswer if one fails, ends or is late."""
        self._number += 1
        for rank, values in arguments.items():
            self._channels[rank].send("ask", number=self._number, question=question, arguments=values)
        deadline = min(time.monotonic() + timeout_s, self.deadline)
        answers: dict[int, Any] = {}
        while waiting := [rank for rank in arguments if rank not in answers]:
            left = deadline - time.monotonic()
            if left < 0:
                raise NoAnswer(f"{self._describe(waiting)} did not answer in time ({question})")
            if gone := [rank for rank in waiting if not self._channels[rank].is_open]:
                raise NoAnswer(f"{self._describe(gone)} ended ({question}); the output there says why")
            wait_until_readable([self._channels[rank].connection for rank in waiting], left)
            for rank in waiting:
                for message in self._channels[rank].receive():
                    try:
                        answers |= self._read(rank, question, message)
                    except ValueError as error:
                        text = f"{self._describe([rank])} sent an answer that cannot be read ({question}): {error}"
                        raise NoAnswer(f"{text}; bring all nodes to the same commit") from None
        return answers

    def _read(self, rank: int, question: str, values: dict[str, Any]) -> dict[int, Any]:
        """Return the rank's answer in this message, if it holds one. Raise ValueError if it cannot be read."""
        message = check(values, Note | Answer | Failure)
        if isinstance(message, Note):
            self._notes[rank] = message.text
        elif message.number != self._number:
            pass  # a late answer to an earlier question
        elif isinstance(message, Failure):
            raise NoAnswer(f"{self._describe([rank])}: {message.text}")
        else:
            return {rank: check(message.value, self._answer_types.get(question, Any))}
        return {}

    def _describe(self, ranks: list[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._hellos[rank].host for rank in ranks))
        last = {self._notes[rank] for rank in ranks if rank in self._notes}
        return f"{format_ranks(ranks)} on {hosts}" + (f", last at {', '.join(sorted(last))}," if last else "")

    def end(self, code: int, text: str, all_alive: bool) -> None:
        """End every rank, this process last. A rank that asked for it prints `text`; if there is none, rank 0 does."""
        others = {rank: channel for rank, channel in self._channels.items() if rank and channel.is_open}
        printer = next((rank for rank in others if self._hellos[rank].prints), 0)
        if not printer:  # print first: torchrun may end this process as soon as another one has ended
            print(text, flush=True)
        for rank, channel in others.items():
            channel.send("end", code=code, text=text if rank == printer else "", all_alive=all_alive)
            channel.flush_within(1.0)
        deadline = time.monotonic() + 2.0
        while (left := deadline - time.monotonic()) > 0 and any(channel.is_open for channel in others.values()):
            wait_until_readable([channel.connection for channel in others.values() if channel.is_open], left)
            for channel in others.values():
                channel.receive()
        end_process(code, "", all_alive)


class Responder:
    """A rank's side: answer questions until rank 0 ends this process. With `prints`, print the final text."""

    def __init__(self, rank: int, connection: socket.socket, prints: bool = False):
        self._rank, self._connection = rank, connection
        self._lock = threading.Lock()
        self._send("hello", rank=rank, host=socket.gethostname(), prints=prints)

    def note(self, text: str) -> None:
        """Tell rank 0 what this rank is doing now."""
        self._send("note", text=text)

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Answer each question in a thread of its own, so that rank 0 can end this process even if an answer hangs."""
        head = "?"
        with suppress(OSError, ValueError):
            for message in read_messages(self._connection, Welcome | Question | End):
                if isinstance(message, Welcome):
                    head = message.host
                elif isinstance(message, Question):
                    threading.Thread(target=self._answer, args=[handlers, message], daemon=True).start()
                else:
                    end_process(message.code, message.text, message.all_alive)
        lost = f"rank {self._rank} on {socket.gethostname()} has lost rank 0 on {head}"
        end_process(1, f"preflight: 1 problem: {lost}; the output of rank 0 says why", False)

    def _answer(self, handlers: Mapping[str, Callable[..., Any]], asked: Question) -> None:
        try:
            self._send("answer", number=asked.number, value=handlers[asked.question](**asked.arguments))
        except Exception as error:
            self._send("failed", number=asked.number, text=f"{asked.question}: {type(error).__name__}: {error}")

    def _send(self, kind: str, **values: Any) -> None:
        with self._lock, suppress(OSError):  # `serve` notices a lost rank 0
            send_message(self._connection, kind, **values)


def end_process(code: int, text: str, all_alive: bool) -> None:
    """Print `text` and end the process, whatever its threads do.

    If ONEWORLD_PREFLIGHT_CODE names a file, write the code there and end with 0, because torchrun would print a report
    for every rank that fails. But if a rank was lost, end with the code, because torchrun would otherwise wait for
    minutes for the node of that rank.
    """
    if text:
        print(text, flush=True)
    if (file := os.environ.get("ONEWORLD_PREFLIGHT_CODE")) and all_alive:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            Path(file).write_text(str(code))
        code = 0
    os._exit(code)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to rank 0. Retry, because it may not listen yet."""
    deadline, refused_at = time.monotonic() + timeout_s, math.inf
    while True:
        try:
            connection = handshake.connect((host, port), handshake.derive_key(PURPOSE), CONNECT_S)
        except OSError as error:
            now, is_refused = time.monotonic(), isinstance(error, handshake.Untrusted)
            refused_at = min(refused_at, now) if is_refused else math.inf
            if now > min(deadline, refused_at + UNTRUSTED_S):
                where = f"{socket.gethostname()} cannot reach rank 0 at {host}:{port}: {error}"
                remedy = "" if is_refused else "; every node must reach every other on any TCP port"
                raise NoAnswer(f"{where}{remedy}") from None
            time.sleep(0.1)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
