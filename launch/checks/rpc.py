"""Ask all ranks from rank 0, with JSON messages over one TCP connection per rank.

There are no collectives, so a rank that dies or hangs can be named and delays the others only until a deadline.
"""

import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.checks.sockets import CONNECT_S
from rl.common.framing import FrameReader, pack
from rl.common.json_channel import MAX_MESSAGE, JsonChannel
from rl.common.text import format_ranks

Handlers = Mapping[str, Callable[..., Any]]
OnEnd = Callable[[int, str, bool], None]


class NoAnswer(Exception):
    """Some ranks failed, ended, or did not answer in time."""


class Coordinator:
    """Rank 0's side: wait for all ranks, ask them, and end them."""

    def __init__(self, server: socket.socket, size: int):
        self._server, self._size = server, size
        self._channels: dict[int, JsonChannel] = {}
        self._hosts: dict[int, str] = {}
        self._notes: dict[int, str] = {}
        self._printer = 0
        self._number = 0
        self._deadline = float("inf")

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until every rank has introduced itself."""
        deadline = time.monotonic() + timeout_s
        strangers: list[JsonChannel] = []
        while len(self._channels) < self._size:
            left = deadline - time.monotonic()
            if left < 0:
                missing = sorted(set(range(self._size)) - self._channels.keys())
                raise NoAnswer(
                    f"{format_ranks(missing)} did not reach rank 0 on {socket.gethostname()} within {timeout_s:g} s; "
                    "their output says why: every node must reach every other on any TCP port"
                )
            ready, _, _ = select.select([self._server, *[channel.connection for channel in strangers]], [], [], left)
            if self._server in ready:
                strangers.append(JsonChannel(self._server.accept()[0]))
            for channel in [*strangers]:
                for message in channel.receive()[:1]:  # a rank sends only this before it is asked
                    if self._is_hello(message):
                        self._admit(channel, message)
                    else:
                        channel.close()
                if channel in self._channels.values() or not channel.is_open:
                    strangers.remove(channel)

    def _is_hello(self, message: Mapping[str, Any]) -> bool:
        """Return whether this is a complete hello, from a rank of this world that has not come yet."""
        rank, is_complete = message.get("rank"), {"rank", "host", "prints"} <= message.keys()
        return message["kind"] == "hello" and is_complete and rank in range(self._size) and rank not in self._channels

    def _admit(self, channel: JsonChannel, hello: Mapping[str, Any]) -> None:
        rank = hello["rank"]
        self._channels[rank], self._hosts[rank] = channel, hello["host"]
        self._printer = rank if hello["prints"] else self._printer
        channel.send("welcome", host=socket.gethostname())

    def limit_time(self, seconds: float) -> None:
        """Set the time limit for all further questions together."""
        self._deadline = time.monotonic() + seconds

    def addresses(self) -> dict[int, str]:
        """Return the address at which other nodes reach each rank.

        It is the address that the rank's connection came from. A rank on this node connects over the loopback. Its
        address is the one at which other nodes have reached this node.
        """
        pairs = {rank: _addresses(channel.connection) for rank, channel in self._channels.items()}
        outside = [own for own, peer in pairs.values() if not _is_loopback(peer)]
        return {rank: outside[0] if _is_loopback(peer) and outside else peer for rank, (_, peer) in pairs.items()}

    def ask(self, question: str, arguments: Mapping[int, Mapping[str, Any]], timeout_s: float) -> dict[int, Any]:
        """Ask the ranks in `arguments` and return their answers. Raise NoAnswer if one fails, ends or is late."""
        self._number += 1
        for rank, values in arguments.items():
            self._channels[rank].send("ask", number=self._number, question=question, arguments=values)
        deadline = min(time.monotonic() + timeout_s, self._deadline)
        answers: dict[int, Any] = {}
        while waiting := [rank for rank in arguments if rank not in answers]:
            left = deadline - time.monotonic()
            if left < 0:
                raise NoAnswer(f"{self._describe(waiting)} did not answer in time ({question})")
            if gone := [rank for rank in waiting if not self._channels[rank].is_open]:
                raise NoAnswer(f"{self._describe(gone)} ended ({question}); its output says why")
            select.select([self._channels[rank].connection for rank in waiting], [], [], left)
            for rank in waiting:
                self._read(rank, answers)
        return answers

    def _read(self, rank: int, answers: dict[int, Any]) -> None:
        for message in self._channels[rank].receive():
            if message["kind"] == "note":
                self._notes[rank] = message["text"]
            elif message["kind"] == "failed" and message["number"] == self._number:
                raise NoAnswer(f"{self._describe([rank])}: {message['text']}")
            elif message["kind"] == "answer" and message["number"] == self._number:
                answers[rank] = message["value"]

    def _describe(self, ranks: list[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._hosts.get(rank, "?") for rank in ranks))
        last = {self._notes[rank] for rank in ranks if rank in self._notes}
        return f"{format_ranks(ranks)} on {hosts}" + (f", last at {', '.join(sorted(last))}," if last else "")

    def end(self, code: int, text: str, all_alive: bool) -> None:
        """End every other rank. The rank that asked to print `text` does so if it is alive, otherwise rank 0."""
        printer = self._printer if self._printer in self._channels and self._channels[self._printer].is_open else 0
        for rank, channel in self._channels.items():
            channel.send("end", code=code, text=text if rank == printer else "", all_alive=all_alive)
            channel.flush_within(1.0)
        if printer == 0:
            print(text, flush=True)
        deadline = time.monotonic() + 2.0
        others = [channel for rank, channel in self._channels.items() if rank and channel.is_open]
        while others and (left := deadline - time.monotonic()) > 0:
            select.select([channel.connection for channel in others], [], [], left)
            for channel in others:
                channel.receive()
            others = [channel for channel in others if channel.is_open]


class Responder:
    """Every rank's side: answer one question after another, and end when rank 0 says so, even if an answer hangs.

    `on_end` receives the exit code, the text to print, and whether all ranks are alive.
    """

    def __init__(self, rank: int, connection: socket.socket, on_end: OnEnd, prints: bool = False):
        self._rank, self._connection, self._on_end = rank, connection, on_end
        self._questions: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lock = threading.Lock()
        self._coordinator_host = "?"
        self._send("hello", rank=rank, host=socket.gethostname(), prints=prints)

    def note(self, text: str) -> None:
        """Tell rank 0 what this rank is doing now."""
        self._send("note", text=text)

    def serve(self, handlers: Handlers) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            message = self._questions.get()
            number, question = message["number"], message["question"]
            try:
                self._send("answer", number=number, value=handlers[question](**message["arguments"]))
            except Exception as error:
                self._send("failed", number=number, text=f"{question}: {type(error).__name__}: {error}")

    def _send(self, kind: str, **values: Any) -> None:
        with self._lock, suppress(OSError):  # the listening thread notices a lost rank 0
            self._connection.sendall(pack(json.dumps({"kind": kind, **values}).encode()))

    def _listen(self) -> None:
        reader = FrameReader(self._connection, MAX_MESSAGE)
        with suppress(OSError, ValueError):
            while True:
                message = json.loads(reader.wait_for_frame().head)
                if message["kind"] == "welcome":
                    self._coordinator_host = message["host"]
                elif message["kind"] == "ask":
                    self._questions.put(message)
                else:
                    self._on_end(message["code"], message["text"], message["all_alive"])
                    return
        lost = f"rank {self._rank} on {socket.gethostname()} has lost rank 0 on {self._coordinator_host}"
        self._on_end(1, f"preflight: 1 problem: {lost}; the output of rank 0 says why", False)


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
                raise NoAnswer(
                    f"{socket.gethostname()} cannot reach rank 0 at {host}:{port}: {error}; every node must reach "
                    "every other on any TCP port"
                ) from None
            time.sleep(0.1)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def _addresses(connection: socket.socket) -> tuple[str, str]:
    own, peer = connection.getsockname()[0], connection.getpeername()[0]
    return own.removeprefix("::ffff:"), peer.removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
