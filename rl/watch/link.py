"""A watchdog's connection to the board, which lives elsewhere (rl/watch/host.py)."""

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from rl.watch.board import CUT_S
from rl.watch.lines import Lines


class Link:
    def __init__(
        self,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        obey: Callable[[dict[str, Any]], None],
        lose: Callable[[str], None],
    ):
        """`obey` gets what the board tells, `lose` why it is out of reach. Raises OSError where it is so at once."""
        self._heard_at = time.monotonic()
        self._line = Lines(socket.create_connection(address, timeout=CUT_S))
        self._selector, self._obey, self._lose = selector, obey, lose
        selector.register(self._line.connection, selectors.EVENT_READ, self._read)

    def send(self, kind: str, **values: Any) -> None:
        self._line.send(kind, **values)

    def tick(self) -> None:
        self._line.flush()
        unheard_s = time.monotonic() - self._heard_at
        if unheard_s > CUT_S:
            self._lose(f"has not been heard of for {unheard_s:.0f} s: its host is down or cut off")

    def forgive(self, seconds: float) -> None:
        """This process itself could not listen for so long."""
        self._heard_at += seconds

    def may_end(self, is_settled: bool) -> bool:
        return is_settled

    def _read(self) -> None:
        for message in self._line.receive():
            self._heard_at = time.monotonic()
            self._obey(message)
        if not self._line.is_open:
            self._selector.unregister(self._line.connection)
            self._lose("is gone: its process ended, or its host was cut off")
