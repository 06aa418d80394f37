"""Choose ports for servers that take a number, not a socket."""

import random
import socket

PORTS = range(10_000, 29_000)  # below those that the kernel gives to clients and to whoever asks for any port


def free_port() -> int:
    """Return a port that nobody uses, and that nobody gets by chance before the caller uses it."""
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise AssertionError(f"100 ports from {PORTS.start} to {PORTS.stop - 1} are taken")
