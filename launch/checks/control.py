"""Rank 0 asks, all ranks answer: one TCP connection each, JSON in lines. No collectives, so that a rank that dies or
hangs is named, and holds up nobody beyond a deadline.
"""

import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.checks.net import CONNECT_S
from rl.watch.lines import Lines
from rl.watch.text import format_ranks

Calls = Mapping[str, Callable[..., Any]]


class Unanswered(Exception):
    """Some ranks did not do what they were asked to."""


class Hub:
    """Of rank 0."""

    def __init__(self, server: socket.socket, size: int):
        self._server, self._size = server, size
        self._lines: dict[int, Lines] = {}
        self._hosts: dict[int, str] = {}
        self._speaker = 0
        self._number = 0
        self._notes: dict[int, str] = {}
        self.deadline = float("inf")

    def gather(self, timeout_s: float) -> None:
        """Waits for every rank to say hello."""
        deadline = time.monotonic() + timeout_s
        strangers: list[Lines] = []
        while len(self._lines) < self._size:
            left = deadline - time.monotonic()
            if left < 0:
                missing = sorted(set(range(self._size)) - self._lines.keys())
                raise Unanswered(
                    f"{format_ranks(missing)} did not reach rank 0 on {socket.gethostname()} within {timeout_s:g} s; "
                    "what they print says why: every node must reach every other on any TCP port"
                )
            for ready in select.select([self._server, *[lines.connection for lines in strangers]], [], [], left)[0]:
                if ready is self._server:
                    strangers.append(Lines(self._server.accept()[0]))
            for lines in [*strangers]:
                for message in lines.receive()[:1]:  # nobody says more before it is asked
                    if not self._is_hello(message):
                        lines.close()  # a stranger
                        break
                    rank = message["rank"]
                    self._lines[rank], self._hosts[rank] = lines, message["host"]
                    self._speaker = rank if message["speaks"] else self._speaker
                    lines.send("welcome", host=socket.gethostname())
                if lines in self._lines.values() or not lines.is_open:
                    strangers.remove(lines)

    def _is_hello(self, message: Mapping[str, Any]) -> bool:
        """Of a rank of this world, and not of one that is here already."""
        rank, is_whole = message.get("rank"), {"rank", "host", "speaks"} <= message.keys()
        return message["kind"] == "hello" and is_whole and rank in range(self._size) and rank not in self._lines

    def addresses(self) -> dict[int, str]:
        """At which other nodes reach each rank: where its connection came from. Of those that came over the loopback,
        the one under which others reached this node."""
        pairs = {rank: _ends(lines.connection) for rank, lines in self._lines.items()}
        outside = [own for own, peer in pairs.values() if not _is_loopback(peer)]
        return {rank: outside[0] if _is_loopback(peer) and outside else peer for rank, (_, peer) in pairs.items()}

    def ask(self, call: str, arguments: Mapping[int, Mapping[str, Any]], timeout_s: float) -> dict[int, Any]:
        """What each of these ranks answers."""
        self._number += 1
        for rank, values in arguments.items():
            self._lines[rank].send("call", number=self._number, call=call, arguments=values)
        deadline = min(time.monotonic() + timeout_s, self.deadline)
        answers: dict[int, Any] = {}
        while len(answers) < len(arguments):
            waiting = [rank for rank in arguments if rank not in answers]
            left = deadline - time.monotonic()
            if left < 0:
                raise Unanswered(f"{self._who(waiting)} did not answer in time ({call})")
            gone = [rank for rank in waiting if not self._lines[rank].is_open]
            if gone:
                raise Unanswered(f"{self._who(gone)} ended ({call}); what it printed says why")
            connections = [self._lines[rank].connection for rank in waiting]
            select.select(connections, [], [], left)
            for rank in waiting:
                self._read(rank, answers)
        return answers

    def _read(self, rank: int, answers: dict[int, Any]) -> None:
        for message in self._lines[rank].receive():
            if message["kind"] == "note":
                self._notes[rank] = message["text"]
            elif message["kind"] == "failed" and message["number"] == self._number:
                raise Unanswered(f"{self._who([rank])}: {message['text']}")
            elif message["kind"] == "answer" and message["number"] == self._number:
                answers[rank] = message["value"]

    def _who(self, ranks: list[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._hosts.get(rank, "?") for rank in ranks))
        last = {self._notes[rank] for rank in ranks if rank in self._notes}
        return f"{format_ranks(ranks)} on {hosts}" + (f", last at {', '.join(sorted(last))}," if last else "")

    def end(self, code: int, text: str, is_whole: bool) -> None:
        """Every other rank ends. One prints: that of the head which said that it would, where it lives, else this."""
        speaker = self._speaker if self._speaker in self._lines and self._lines[self._speaker].is_open else 0
        for rank, lines in self._lines.items():
            lines.send("end", code=code, text=text if rank == speaker else "", is_whole=is_whole)
            lines.flush_within(1.0)
        if speaker == 0:
            print(text, flush=True)
        self._wait_closed(2.0)

    def _wait_closed(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        others = [lines for rank, lines in self._lines.items() if rank]
        while (left := deadline - time.monotonic()) > 0 and (open_ones := [one for one in others if one.is_open]):
            select.select([one.connection for one in open_ones], [], [], left)
            for one in open_ones:
                one.receive()


class Member:
    """Of every rank. Calls run one after another; an end is heard also while one of them hangs."""

    def __init__(self, rank: int, connection: socket.socket, calls: Calls, speaks: bool = False):
        self._rank, self._connection, self._calls = rank, connection, calls
        self._todo: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lock = threading.Lock()
        self._hub_host = "?"
        self.send("hello", rank=rank, host=socket.gethostname(), speaks=speaks)

    def send(self, kind: str, **values: Any) -> None:
        with self._lock, suppress(OSError):  # a lost rank 0 is seen by the reader
            self._connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            message = self._todo.get()
            number, call = message["number"], message["call"]
            try:
                self.send("answer", number=number, value=self._calls[call](**message["arguments"]))
            except Exception as error:
                self.send("failed", number=number, text=f"{call}: {type(error).__name__}: {error}")

    def _listen(self) -> None:
        with suppress(OSError):
            for line in self._connection.makefile():
                message = json.loads(line)
                if message["kind"] == "welcome":
                    self._hub_host = message["host"]
                elif message["kind"] == "call":
                    self._todo.put(message)
                elif self._rank:
                    finish(message["code"], message["text"], message["is_whole"])
                else:
                    return
        if self._rank:
            lost = f"rank {self._rank} on {socket.gethostname()} has lost rank 0 on {self._hub_host}"
            finish(1, f"preflight: 1 problem: {lost}; what that printed says why", is_whole=False)


def finish(code: int, text: str, is_whole: bool) -> None:
    """Ends the process, whatever its threads do. A launcher that names a file for the code is told there, and torchrun
    is not made to print where each rank ended; but where the world is not whole, torchrun would wait minutes for the
    node that has failed, unless this one fails too."""
    if text:
        print(text, flush=True)
    if (file := os.environ.get("ONEWORLD_PREFLIGHT_CODE")) and is_whole:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            Path(file).write_text(str(code))
        code = 0
    os._exit(code)


def reach(host: str, port: int, timeout_s: float) -> socket.socket:
    """Rank 0 may begin to listen a little later."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _without_timeout(socket.create_connection((host, port), timeout=CONNECT_S))
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unanswered(
                    f"{socket.gethostname()} cannot reach rank 0 at {host}:{port}: {error}; every node must reach "
                    "every other on any TCP port"
                ) from None
            time.sleep(0.1)


def _without_timeout(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _ends(connection: socket.socket) -> tuple[str, str]:
    own, peer = connection.getsockname()[0], connection.getpeername()[0]
    return own.removeprefix("::ffff:"), peer.removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def every(ranks: Iterable[int], **values: Any) -> dict[int, dict[str, Any]]:
    """The same arguments for each."""
    return dict.fromkeys(ranks, values)
