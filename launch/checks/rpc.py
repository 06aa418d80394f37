"""Ask all ranks from rank 0, with JSON messages over one TCP connection per rank.

There are no collectives, so a rank that dies or hangs can be named and delays the others only until a deadline.
"""

import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.checks.sockets import CONNECT_S, Acceptor, read_messages, send_message
from rl.common.json_channel import JsonChannel
from rl.common.text import format_ranks

ANSWER_S = 8.0


class NoAnswer(Exception):
    """Some ranks failed, ended, or did not answer in time."""


class Coordinator:
    """Rank 0's side: wait for all ranks, ask them, and end them. `deadline` limits all questions together."""

    def __init__(self, server: socket.socket, num_ranks: int):
        self._acceptor, self.num_ranks = Acceptor(server, {"rank", "host", "prints"}), num_ranks
        self._channels: dict[int, JsonChannel] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._notes: dict[int, str] = {}
        self._number, self.deadline = 0, float("inf")

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until every rank has introduced itself."""
        deadline = time.monotonic() + timeout_s
        while missing := sorted(set(range(self.num_ranks)) - self._channels.keys()):
            left = deadline - time.monotonic()
            if left < 0:
                text = f"{format_ranks(missing)} did not reach rank 0 on {socket.gethostname()} within {timeout_s:g} s"
                raise NoAnswer(f"{text}; their output says why: every node must reach every other on any TCP port")
            for channel, hello in self._acceptor.poll(left):
                rank = hello["rank"]
                if rank in range(self.num_ranks) and rank not in self._channels:
                    self._channels[rank], self._hellos[rank] = channel, hello
                    channel.send("welcome", host=socket.gethostname())
                else:
                    channel.close()

    def addresses(self) -> dict[int, str]:
        """Return the address at which other nodes reach each rank: the one that its connection came from."""
        connections = {rank: channel.connection for rank, channel in self._channels.items()}
        peers = {rank: each.getpeername()[0].removeprefix("::ffff:") for rank, each in connections.items()}
        local = [rank for rank, peer in peers.items() if ipaddress.ip_address(peer).is_loopback]
        # A rank on this node connects over the loopback. Others reach it where they have reached this node.
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
                raise NoAnswer(f"{self._describe(gone)} ended ({question}); its output says why")
            select.select([self._channels[rank].connection for rank in waiting], [], [], left)
            for rank in waiting:
                for message in self._channels[rank].receive():
                    if message["kind"] == "note":
                        self._notes[rank] = message["text"]
                    elif message["number"] != self._number:
                        pass  # a late answer to an earlier question
                    elif message["kind"] == "failed":
                        raise NoAnswer(f"{self._describe([rank])}: {message['text']}")
                    else:
                        answers[rank] = message["value"]
        return answers

    def _describe(self, ranks: list[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._hellos[rank]["host"] for rank in ranks))
        last = {self._notes[rank] for rank in ranks if rank in self._notes}
        return f"{format_ranks(ranks)} on {hosts}" + (f", last at {', '.join(sorted(last))}," if last else "")

    def end(self, code: int, text: str, all_alive: bool) -> None:
        """End every rank, this process last. A rank that asked to print `text` does so, if none is alive rank 0."""
        others = {rank: channel for rank, channel in self._channels.items() if rank and channel.is_open}
        printer = next((rank for rank in others if self._hellos[rank]["prints"]), 0)
        for rank, channel in others.items():
            channel.send("end", code=code, text=text if rank == printer else "", all_alive=all_alive)
            channel.flush_within(1.0)
        if not printer:
            print(text, flush=True)
        deadline = time.monotonic() + 2.0
        while (left := deadline - time.monotonic()) > 0 and any(channel.is_open for channel in others.values()):
            select.select([channel.connection for channel in others.values() if channel.is_open], [], [], left)
            for channel in others.values():
                channel.receive()
        end_process(code, "", all_alive)


class Responder:
    """A rank's side: answer questions until rank 0 ends this process. `prints` asks for the text at the end."""

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
            for message in read_messages(self._connection):
                if message["kind"] == "welcome":
                    head = message["host"]
                elif message["kind"] == "ask":
                    threading.Thread(target=self._answer, args=[handlers, message], daemon=True).start()
                else:
                    end_process(message["code"], message["text"], message["all_alive"])
        lost = f"rank {self._rank} on {socket.gethostname()} has lost rank 0 on {head}"
        end_process(1, f"preflight: 1 problem: {lost}; the output of rank 0 says why", False)

    def _answer(self, handlers: Mapping[str, Callable[..., Any]], message: Mapping[str, Any]) -> None:
        number, question = message["number"], message["question"]
        try:
            self._send("answer", number=number, value=handlers[question](**message["arguments"]))
        except Exception as error:
            self._send("failed", number=number, text=f"{question}: {type(error).__name__}: {error}")

    def _send(self, kind: str, **values: Any) -> None:
        with self._lock, suppress(OSError):  # `serve` notices a lost rank 0
            send_message(self._connection, kind, **values)


def end_process(code: int, text: str, all_alive: bool) -> None:
    """Print `text` and end the process, whatever its threads do.

    If the launcher named a file for the exit code, the code goes there and the process ends with 0. Otherwise torchrun
    would print a report for every failed rank. But if a rank was lost, the process must fail, because torchrun would
    wait for minutes for the node of that rank.
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
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{socket.gethostname()} cannot reach rank 0 at {host}:{port}: {error}"
                raise NoAnswer(f"{where}; every node must reach every other on any TCP port") from None
            time.sleep(0.1)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
