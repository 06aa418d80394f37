"""Choose the node that tells the webhook about the end of a run if the node of rank 0 is lost with its watchdog.

The first watchdog of each other node that has ONEWORLD_WEBHOOK is a deputy. It listens on a port, and the board tells
every deputy how to reach the others. If the board is lost, each deputy tries to reach those of lower ranks. The one
that reaches none of them sends the message.
"""

import socket
import threading
import time
from contextlib import suppress

from rl.common.handshake import Listener, Refusals, connect
from rl.watch.board import CUT_S

REACH_S = 3.0  # limit for a deputy to answer
STAY_S = CUT_S  # the others may notice later that the board is lost; until then, they must reach this deputy


class Deputy:
    """A deputy, which other deputies can reach as long as it lives. `others` are the addresses of all, by rank."""

    def __init__(self, rank: int, host: str, key: bytes, refusals: Refusals):
        self.others: dict[int, tuple[str, int]] = {}
        self._rank, self._key = rank, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = server.getsockname()[:2]
        Listener(server, key, lambda connection, host: connection.close(), refusals)

    def is_first(self) -> bool:
        """Return whether this deputy reaches no other one of a lower rank. All are tried at the same time."""
        if self._rank not in self.others:  # the board was lost before it had told the deputies about each other
            return False
        reached: list[int] = []
        lower = [rank for rank in self.others if rank < self._rank]
        threads = [threading.Thread(target=self._reach, args=[rank, reached], daemon=True) for rank in lower]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REACH_S + 1)
        return not reached

    def stay(self, lost_at: float) -> None:
        """Wait until the deputies of higher ranks have noticed too that the board is lost."""
        if any(rank > self._rank for rank in self.others):
            time.sleep(max(0.0, lost_at + STAY_S - time.monotonic()))

    def _reach(self, rank: int, reached: list[int]) -> None:
        with suppress(OSError):
            connect(self.others[rank], self._key, REACH_S).close()
            reached.append(rank)
