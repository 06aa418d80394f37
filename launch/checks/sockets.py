"""Helpers around sockets that need no torch."""

import os
import socket
from contextlib import suppress

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
