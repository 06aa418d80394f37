"""Sockets and messages of the roll call and of preflight. Nothing here imports torch."""

import json
import os
import select
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from rl.common.framing import FrameReader, pack
from rl.common.json_channel import MAX_MESSAGE, JsonChannel

CONNECT_S = 3.0


def listen(port: int) -> socket.socket:
    """Listen on all addresses, IPv6 and IPv4 where the host has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def is_own_address(host: str) -> bool:
    """Return whether `host` is an address of this machine. Only such an address can be bound."""
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


def send_message(connection: socket.socket, kind: str, **values: Any) -> None:
    connection.sendall(pack(json.dumps({"kind": kind, **values}).encode()))


def read_messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages of a blocking connection. Its end is an OSError, an invalid message a ValueError."""
    reader = FrameReader(connection, MAX_MESSAGE)
    while True:
        yield json.loads(reader.wait_for_frame().head)


class Acceptor:
    """Accept connections and read their first message. Close those of strangers, who send no hello with `fields`."""

    def __init__(self, server: socket.socket, fields: set[str]):
        self._server, self._fields = server, {"kind", *fields}
        self._silent: list[JsonChannel] = []

    def poll(self, timeout_s: float, members: Iterable[JsonChannel] = ()) -> list[tuple[JsonChannel, dict[str, Any]]]:
        """Wait until something arrives, from a member too. Return the new members, each with its hello."""
        connections = [channel.connection for channel in (*self._silent, *members)]
        if self._server in select.select([self._server, *connections], [], [], timeout_s)[0]:
            self._silent.append(JsonChannel(self._server.accept()[0]))
        found = []
        for channel in [*self._silent]:
            messages = channel.receive()
            if messages or not channel.is_open:
                self._silent.remove(channel)
            if messages and messages[0]["kind"] == "hello" and self._fields <= messages[0].keys():
                found.append((channel, messages[0]))
            elif messages:
                channel.close()
        return found
