"""Measure transfer rates over TCP: a schedule of pairs, the transfers, and which links are slow."""

import json
import socket
import statistics
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from launch.checks.results import Names
from launch.checks.sockets import CONNECT_S, listen, reason

Link = tuple[int, int]  # from, to
SLOW = 0.5  # fraction of the usual rate
BLOCK = bytes(1 << 18)
# SO_LINGER that discards unsent bytes when a transfer ends: they must not disturb the next one.
RESET = struct.pack("ii", 1, 0)


def pair_rounds(count: int) -> list[list[Link]]:
    """Return all pairs of `count` members in rounds. In a round each member is in at most one pair."""
    members: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(members) - 1):
        half = len(members) // 2
        pairs = zip(members[:half], reversed(members[half:]))
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        members = [members[0], members[-1], *members[1:-1]]
    return found


def usual_rate(rates: Mapping[Link, float]) -> float:
    """Return the median over members of their best rate.

    A median over links would not do: one slow member of three makes most of the links slow.
    """
    best: dict[int, float] = defaultdict(float)
    for link, rate in rates.items():
        for member in link:
            best[member] = max(best[member], rate)
    return statistics.median(best.values())


def slow_links(rates: Mapping[Link, float], floor: float) -> list[Link]:
    """Return links below half of the usual rate. A link above `floor` is fast enough, whatever the others reach."""
    if not rates:
        return []
    limit = min(SLOW * usual_rate(rates), floor)
    return sorted(link for link, rate in rates.items() if rate < limit or not rate)


def describe_slow(slow: Iterable[Link], rates: Mapping[Link, float], names: Names) -> list[str]:
    """Return a line for each member that is slow with all others, and for each other slow pair."""
    left, lines = set(slow), []
    for text, ends in (
        ("is slow with all others", (0, 1)),
        ("sends slowly to all", (0,)),
        ("receives slowly from all", (1,)),
    ):
        for member in sorted({member for link in rates for member in link}):
            links = {link for link in rates if any(link[end] == member for end in ends)}
            if len(links) > len(ends) and links <= left:
                lines.append(f"{names.one(member)} {text}: {format_rate(max(rates[link] for link in links))} at best")
                left -= links
    for a, b in sorted(left):
        if (b, a) not in left:
            lines.append(f"{names.one(a)} to {names.one(b)}: {format_rate(rates[a, b])}")
        elif a < b:
            lines.append(f"{names.one(a)} and {names.one(b)}: {format_rate(min(rates[a, b], rates[b, a]))}")
    return lines


def format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 5e7 else f"{bytes_per_s / 1e6:.2g} MB/s"


class Sink:
    """Receive bytes from other ranks for as long as they ask for, and tell them the rate."""

    def __init__(self) -> None:
        self._server = listen(0)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._receive, args=[connection], daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        buffer = bytearray(len(BLOCK))
        with connection, suppress(OSError, ValueError, struct.error):
            connection.settimeout(CONNECT_S)
            seconds = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL))[0]
            count, begun = 0, time.perf_counter()
            with suppress(TimeoutError):
                while (left := begun + seconds - time.perf_counter()) > 0:
                    connection.settimeout(left)
                    size = connection.recv_into(buffer)
                    if not size:
                        return
                    count += size
            took = time.perf_counter() - begun
            connection.settimeout(CONNECT_S)
            connection.sendall(json.dumps({"rate": count / took}).encode())
            while connection.recv_into(buffer):  # close only after the sender has read the answer
                pass


def measure_rate(address: str, port: int, seconds: float) -> dict[str, Any]:
    """Send to a Sink. Return the `rate` in bytes per second that arrived there, or an `error`."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.sendall(struct.pack("d", seconds))
            end = time.perf_counter() + seconds
            with suppress(TimeoutError):
                while (left := end - time.perf_counter()) > 0:
                    connection.settimeout(left)
                    connection.send(BLOCK)
            connection.settimeout(CONNECT_S)
            return json.loads(connection.recv(4096))
    except (OSError, ValueError) as error:
        return {"error": reason(error)}


def find_unreachable(places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Connect to all places at once. Return the reason for each one that cannot be reached."""
    errors: dict[str, str] = {}

    def connect(key: str, place: tuple[str, int]) -> None:
        try:
            socket.create_connection(place, timeout=CONNECT_S).close()
        except OSError as error:
            errors[key] = reason(error)

    threads = [threading.Thread(target=connect, args=[key, tuple(place)], daemon=True) for key, place in places.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT_S + 1.0)
    return errors
