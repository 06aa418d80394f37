"""Connect a watchdog to the board, which runs in the watchdog of rank 0 (rl/watch/board_server.py)."""

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from rl.common.json_channel import JsonChannel
from rl.watch.board import CUT_S


class BoardClient:
    """One watchdog's connection to the board."""

    def __init__(
        self,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
    ):
        """Connect, or raise OSError.

        `on_message` receives the board's messages. `on_lost` receives the reason when the connection is lost later.
        """
        self._heard_at = time.monotonic()
        self._channel = JsonChannel(socket.create_connection(address, timeout=CUT_S))
        self._selector, self._on_message, self._on_lost = selector, on_message, on_lost
        selector.register(self._channel.connection, selectors.EVENT_READ, self._read)

    def send(self, kind: str, **values: Any) -> None:
        self._channel.send(kind, **values)

    def tick(self) -> None:
        self._channel.flush()
        unheard_s = time.monotonic() - self._heard_at
        if unheard_s > CUT_S:
            self._on_lost(f"has not been heard of for {unheard_s:.0f} s: its host is down or cut off")

    def exclude_pause(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which this process did not run."""
        self._heard_at += seconds

    def may_end(self, is_settled: bool) -> bool:
        return is_settled

    def _read(self) -> None:
        for message in self._channel.receive():
            self._heard_at = time.monotonic()
            self._on_message(message)
        if not self._channel.is_open:
            self._selector.unregister(self._channel.connection)
            self._on_lost("is gone: its process ended, or its host was cut off")
