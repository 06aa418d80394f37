"""Measure transfer rates over TCP: a schedule of pairs, the transfers, and which links are slow."""

import socket
import statistics
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from launch.checks.sockets import CONNECT_S, reason, say_refused
from rl.common.handshake import Listener, Refusals, connect, derive_key

Link = tuple[int, int]  # from, to
PURPOSE = "bandwidth"
MAX_S = 10.0  # of a transfer
SLOW = 0.5  # fraction of the usual rate
BLOCK = bytes(1 << 18)
DOUBLE = struct.Struct("d")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER that discards unsent bytes: they must not disturb the next transfer


def pair_rounds(count: int) -> list[list[Link]]:
    """Return all pairs of `count` members in rounds. In a round each member is in at most one pair."""
    odd = count - 1 + count % 2
    found = []
    for number in range(odd):  # pairs add up to it, modulo `odd`; the last of an even number meets whoever is left
        pairs = [(a, (number - a) % odd) for a in range(odd)]
        found.append([(a, b if a < b else odd) for a, b in pairs if a < b or (a == b and odd < count)])
    return found


def usual_rate(rates: Mapping[Link, float]) -> float:
    """Return the median over members of their best rate. One slow member of three makes most of the links slow."""
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


def describe_slow(slow: Iterable[Link], rates: Mapping[Link, float], names: Sequence[str]) -> list[str]:
    """Return a line for each member that is slow with all others, and for each other slow pair."""
    left, lines = set(slow), []
    kinds = {"is slow with all others": [0, 1], "sends slowly to all": [0], "receives slowly from all": [1]}
    for text, ends in kinds.items():
        for member in sorted({member for link in rates for member in link}):
            links = {link for link in rates if any(link[end] == member for end in ends)}
            if len(links) > len(ends) and links <= left:
                lines.append(f"{names[member]} {text}: {format_rate(max(rates[link] for link in links))} at best")
                left -= links
    for a, b in sorted(left):
        if (b, a) not in left:
            lines.append(f"{names[a]} to {names[b]}: {format_rate(rates[a, b])}")
        elif a < b:
            lines.append(f"{names[a]} and {names[b]}: {format_rate(min(rates[a, b], rates[b, a]))}")
    return lines


def format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 5e7 else f"{bytes_per_s / 1e6:.2g} MB/s"


def receive_all(server: socket.socket) -> Listener:
    """Receive bytes from other ranks for as long as they ask for, and tell them the rate. Do so in other threads."""

    def start(connection: socket.socket, host: str) -> None:
        threading.Thread(target=_receive, args=[connection], daemon=True).start()

    return Listener(server, derive_key(PURPOSE), start, Refusals(say_refused))


def accept_all(server: socket.socket) -> Listener:
    """Let `find_unreachable` of other ranks find this place."""
    return Listener(server, derive_key(PURPOSE), lambda connection, host: connection.close(), Refusals(say_refused))


def _receive(connection: socket.socket) -> None:
    buffer = bytearray(len(BLOCK))
    with connection, suppress(OSError, struct.error):
        connection.settimeout(CONNECT_S)
        seconds = DOUBLE.unpack(connection.recv(8, socket.MSG_WAITALL))[0]
        if not 0 < seconds <= MAX_S:
            return
        connection.sendall(DOUBLE.pack(_transfer(connection, seconds, lambda: connection.recv_into(buffer))))
        while connection.recv_into(buffer):  # close only after the sender has read the answer
            pass


def _transfer(connection: socket.socket, seconds: float, move: Callable[[], int]) -> float:
    """Call `move` for this long. Return how many bytes it moved per second."""
    begun, count = time.perf_counter(), 0
    with suppress(TimeoutError):
        while (left := begun + seconds - time.perf_counter()) > 0:
            connection.settimeout(left)
            count += move()
    connection.settimeout(CONNECT_S)
    return count / (time.perf_counter() - begun)


def measure_rate(address: str, port: int, seconds: float) -> float:
    """Return the rate in bytes per second at which `receive_all` of another rank receives, 0.0 without a connection."""
    with suppress(OSError, struct.error), connect((address, port), derive_key(PURPOSE), CONNECT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sendall(DOUBLE.pack(seconds))
        _transfer(connection, seconds, lambda: connection.send(BLOCK))
        return DOUBLE.unpack(connection.recv(8, socket.MSG_WAITALL))[0]
    return 0.0


def find_unreachable(places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Connect to ranks at these places, all at once. Return the reason for each one that cannot be reached."""

    def trouble(place: tuple[str, int]) -> str:
        try:
            connect((place[0], place[1]), derive_key(PURPOSE), CONNECT_S).close()  # JSON made it a list
        except OSError as error:
            return reason(error)
        return ""

    with ThreadPoolExecutor(max(1, len(places))) as pool:
        return {key: text for key, text in zip(places, pool.map(trouble, places.values())) if text}
