"""Sockets and messages of the roll call and of preflight. Nothing here imports torch.

Only those who know the run's secret can connect (rl/common/handshake.py). Messages are JSON objects, each with the
fields of a `msgspec.Struct`, whose tag is their kind.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from rl.common.framing import FrameReader, pack
from rl.common.handshake import HANDSHAKE_S, Listener, Refusals
from rl.common.json_channel import MAX_MESSAGE, JsonChannel
from rl.common.waiting import wait_until_readable

CONNECT_S = 3.0  # limit for a connect, and for the first answer
POLL_S = 1.0  # interval at which connections without a hello are checked
M = TypeVar("M")
Name = Annotated[str, msgspec.Meta(max_length=300)]  # a host name, perhaps with a process id
Number = Annotated[int, msgspec.Meta(ge=0)]


def listen(port: int) -> socket.socket:
    """Listen on all addresses, IPv6 and IPv4 where the host has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def is_own_address(host: str) -> bool:
    """Return whether `host` is an address of this machine: only its own addresses can be bound."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def reason(error: Exception) -> str:
    """Return the text of a network error without its number."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:  # for an unknown host name it is negative
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def say_refused(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check(value: Any, kind: Any) -> Any:
    """Return `value` as an instance of the type `kind`. Raise ValueError if fields are missing or of another type."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def send_message(connection: socket.socket, kind: str, **values: Any) -> None:
    connection.sendall(pack(json.dumps({"kind": kind, **values}).encode()))


def read_messages(connection: socket.socket, kinds: Any) -> Iterator[Any]:
    """Yield messages from a blocking connection. Raise OSError when it ends, ValueError for an invalid message."""
    reader = FrameReader(connection, MAX_MESSAGE)
    while True:
        try:
            message = json.loads(reader.wait_for_frame().head)
        except RecursionError:
            raise ValueError("got JSON that is nested too deeply") from None
        yield check(message, kinds)


class Acceptor(Generic[M]):
    """Accept connections from those who know the secret. The first message of each must be a `hello`."""

    def __init__(self, server: socket.socket, key: bytes, hello: type[M]):
        self._hello, self._refusals = hello, Refusals(say_refused)
        self._new: SimpleQueue[tuple[socket.socket, str]] = SimpleQueue()
        self._silent: dict[JsonChannel, tuple[str, float]] = {}  # host, and deadline of its hello
        self._woken, self._waker = socket.socketpair()
        self._listener = Listener(server, key, self._admit, self._refusals)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def poll(self, timeout_s: float, members: Iterable[JsonChannel] = ()) -> list[tuple[JsonChannel, M]]:
        """Wait for new connections, hellos and messages from members. Return the new members with their hellos."""
        connections = [channel.connection for channel in (*self._silent, *members)]
        wait_until_readable([self._woken, *connections], min(timeout_s, POLL_S))
        while not self._new.empty():
            connection, host = self._new.get()
            self._woken.recv(1)
            self._silent[JsonChannel(connection)] = (host, time.monotonic() + HANDSHAKE_S)
        found = []
        for channel, (host, deadline) in [*self._silent.items()]:
            if messages := channel.receive():
                del self._silent[channel]
                try:
                    found.append((channel, check(messages[0], self._hello)))
                except ValueError as error:
                    self._refuse(channel, host, f"its hello cannot be read: {error}")
            elif not channel.is_open or time.monotonic() > deadline:
                del self._silent[channel]
                self._refuse(channel, host, "it sent no message that can be read")
        return found

    def _admit(self, connection: socket.socket, host: str) -> None:
        self._new.put((connection, host))
        self._waker.send(b"x")

    def _refuse(self, channel: JsonChannel, host: str, why: str) -> None:
        channel.close()
        self._refusals.add(host, f"it knows the run's secret, but {why}")
